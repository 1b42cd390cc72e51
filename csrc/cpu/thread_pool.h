// The process's one pool of compute threads.
//
// parallel_for cuts [0, n) into ranges that idle threads claim one after the other: large ranges
// first, `grain` at the end, so a thread that is late or descheduled costs little. The caller takes
// part and never waits for a worker that has not claimed a range. Which thread computes a range is
// not fixed; a body must give the same bits whoever runs it, in whatever ranges.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

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

}  // namespace tinyvllm::cpu
