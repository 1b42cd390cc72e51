// Runs recorded graphs one after the other on a thread of its own, as a GPU runs its stream: the
// next step is queued while this one computes, so that the cores need not wait for the host.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "graph.h"

namespace tinyvllm::cpu {

// One launch of a graph. Shared by the stream, which runs it, and whoever waits for it.
class Launch {
 public:
  // Blocks until the graph has run; rethrows what one of its ops threw.
  void wait();

  // Nobody wants the result: what has not run yet is left out, and `result` is undefined.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // After wait(). The values that stood at the launch's `result` when its last op ended; the next
  // launch may have overwritten them since.
  const std::vector<int32_t>& result() const { return result_; }
  double seconds() const { return seconds_; }
  // How long the stream had nothing to do before it.
  double idle_seconds() const { return idle_seconds_; }

 private:
  friend class Stream;
  void run_ops(size_t first, size_t end);
  void announce();

  const Graph* graph_ = nullptr;
  const int32_t* source_ = nullptr;
  std::vector<int32_t> result_;
  double seconds_ = 0;
  double idle_seconds_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

class Stream {
 public:
  Stream();
  // Runs what is queued, then ends the thread.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queues `graph`, which must live until the launch is done. `result` [n] is copied at its end.
  std::shared_ptr<Launch> launch(const Graph* graph, const int32_t* result, int64_t n);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Launch>> queue_;
  bool closing_ = false;
  const int64_t pid_;
  std::thread thread_;
};

}  // namespace tinyvllm::cpu
