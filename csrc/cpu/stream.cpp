#include "stream.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace tinyvllm::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Waking the thread that waits for a result costs 20 us and more where its core has to be woken up
// too. With a next launch in the queue it is done when the cores are at work on that one: the first
// ops of a step are small and run on one thread.
constexpr size_t kAnnounceAfter = 4;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

void Launch::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (error_ != nullptr) std::rethrow_exception(error_);
}

Stream::Stream() : pid_(getpid()) {
  // The thread takes no signals: one that is delivered here would not interrupt the main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { work(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Stream::~Stream() {
  if (getpid() != pid_) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

std::shared_ptr<Launch> Stream::launch(const Graph* graph, const int32_t* result, int64_t n) {
  auto launch = std::make_shared<Launch>();
  launch->graph_ = graph;
  launch->source_ = result;
  launch->result_.resize(n);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(launch);
  }
  changed_.notify_one();
  return launch;
}

// An op's exception ends the launch: what follows it does not run.
void Launch::run_ops(size_t first, size_t end) {
  if (error_ != nullptr) return;
  try {
    graph_->replay(first, end, cancelled_);
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Launch::announce() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
}

void Stream::work() {
#ifdef __linux__
  pthread_setname_np(pthread_self(), "tinyvllm-stream");
#endif
  std::shared_ptr<Launch> last;  // has run, and nobody knows yet
  Clock::time_point end = Clock::now();
  while (true) {
    std::shared_ptr<Launch> launch;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (queue_.empty() && last != nullptr) {
        lock.unlock();
        std::exchange(last, nullptr)->announce();
        lock.lock();
      }
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      launch = std::move(queue_.front());
      queue_.pop_front();
    }
    const Clock::time_point start = Clock::now();
    launch->idle_seconds_ = seconds_between(end, start);
    const size_t size = launch->graph_->size();
    const size_t first = last == nullptr ? 0 : std::min(size, kAnnounceAfter);
    launch->run_ops(0, first);
    if (last != nullptr) std::exchange(last, nullptr)->announce();
    launch->run_ops(first, size);
    std::copy_n(launch->source_, launch->result_.size(), launch->result_.begin());
    end = Clock::now();
    launch->seconds_ = seconds_between(start, end);
    last = std::move(launch);
  }
}

}  // namespace tinyvllm::cpu
