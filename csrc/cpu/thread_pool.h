// The process's one pool of compute threads.
//
// parallel_for cuts [0, n) into ranges that idle threads claim one after the other: large ranges
// first, `grain` at the end, so a thread that is late or descheduled costs little. The caller takes
// part and never waits for a worker that has not claimed a range. Which thread computes a range is
// not fixed; a body must give the same bits whoever runs it, in whatever ranges.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace tinyvllm::cpu {

// Threads that a parallel region may use, the caller included. Until set: TINYVLLM_NUM_THREADS, or
// the CPUs that affinity and the cgroup's quota (v1 or v2) leave to this process.
int num_threads();

// Sets the number for the whole process (1 or more; larger than 1024 means 1024). Waits for a
// running region.
void set_num_threads(int n);

namespace detail {
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
void run_parallel(int64_t n, int64_t grain, ParallelBody body, void* context);
}  // namespace detail

// Calls f(begin, end) for disjoint ranges that cover [0, n); every begin is a multiple of grain.
// Returns when all are done, with their writes visible. The first exception thrown by f cancels the
// ranges that nobody has claimed and is rethrown here. Inside f a nested parallel_for runs inline.
// One region runs at a time: a second caller waits. Must not be called with the GIL held.
template <typename F>
void parallel_for(int64_t n, int64_t grain, F&& f) {
  if (n <= 0) return;
  if (n <= grain) {
    f(int64_t{0}, n);
    return;
  }
  using Callable = std::remove_reference_t<F>;
  detail::run_parallel(
      n, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Callable*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

// Work of many parallel_for that goes on while its owner does something else. A worker that is
// awake takes it at once and calls the parallel_for; wait() joins in as one of the threads. If no
// worker has taken it by then, the owner runs it itself: nobody ever waits for a thread to wake up.
class Task {
 public:
  explicit Task(std::function<void()> work) : work_(std::move(work)) {}
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  // Drops work that nobody has taken and waits for work that somebody has.
  ~Task();

  // Once before each wait().
  void start();
  // Returns when the work is done, with its writes visible, and rethrows its exception.
  void wait();

 private:
  friend class ThreadPool;
  void run();

  std::function<void()> work_;
  std::exception_ptr error_;
  bool offered_ = false;
  std::atomic<bool> done_{true};
};

}  // namespace tinyvllm::cpu
