#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif
#include <pthread.h>
#include <signal.h>

namespace tinyvllm::cpu {
namespace {

constexpr int kMaxThreads = 1024;

// How long a worker looks for the next region before it sleeps: longer than the gap between two ops
// of a step, far shorter than anything a person or a power meter notices. After the first part it
// yields between looks, so that on a full machine the event loop's thread gets the core.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kLooksPerClockRead = 32;
constexpr int kLooksBeforeYield = 256;

void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int affinity_cpus() {
#ifdef __linux__
  // The mask must hold every CPU that the kernel could have, so it grows until the call accepts it.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(cpus);
    const bool ok = sched_getaffinity(0, size, set) == 0;
    const int count = ok ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (ok) return std::max(1, count);
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Whole CPUs of quota/period, at least 1. Rounded down: a thread more than the quota would be
// throttled in the middle of a step, and the fraction serves the event loop.
int whole_cpus(double quota, double period) {
  if (!(quota > 0) || !(period > 0)) return kMaxThreads;
  return static_cast<int>(std::clamp(quota / period, 1.0, static_cast<double>(kMaxThreads)));
}

// The lines of a small file; none if it cannot be read. By C's stdio: streams of the C++ library
// are not safe in a module that other modules, with their own copies of it, are loaded beside
// (seen: std::ifstream crashing in a process that has imported a CUDA build of torch).
std::vector<std::string> read_lines(const std::string& path) {
  std::vector<std::string> lines;
  FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return lines;
  char buffer[4096];
  std::string line;
  while (std::fgets(buffer, sizeof(buffer), file) != nullptr) {
    line += buffer;
    if (line.back() != '\n') continue;
    line.pop_back();
    lines.push_back(std::exchange(line, {}));
  }
  if (!line.empty()) lines.push_back(line);
  std::fclose(file);
  return lines;
}

double read_number(const std::string& path) {
  const std::vector<std::string> lines = read_lines(path);
  return lines.empty() ? -1 : std::atof(lines[0].c_str());
}

int cgroup_v2_cpus(const std::string& dir) {
  // "150000 100000"; without a quota "max 100000", which is no number.
  const std::vector<std::string> lines = read_lines(dir + "/cpu.max");
  double quota = 0, period = 0;
  if (lines.empty() || std::sscanf(lines[0].c_str(), "%lf %lf", &quota, &period) != 2) {
    return kMaxThreads;
  }
  return whole_cpus(quota, period);
}

int cgroup_v1_cpus(const std::string& dir) {
  return whole_cpus(read_number(dir + "/cpu.cfs_quota_us"),
                    read_number(dir + "/cpu.cfs_period_us"));
}

// The smallest quota on the way from this process's group up to the root. In a container the
// group's own path may not exist below the mount; the root, which is then the container's group,
// does.
template <typename Read>
int smallest_quota(const std::string& mount, std::string group, Read read) {
  int cpus = read(mount);
  while (group.size() > 1) {
    cpus = std::min(cpus, read(mount + group));
    group.resize(group.find_last_of('/'));
  }
  return cpus;
}

// Whether "cpu" is in a list like "cpu,cpuacct".
bool names_cpu(const std::string& controllers) {
  for (size_t at = 0; at <= controllers.size(); at = controllers.find(',', at) + 1) {
    const size_t end = std::min(controllers.find(',', at), controllers.size());
    if (controllers.compare(at, end - at, "cpu") == 0) return true;
    if (end == controllers.size()) break;
  }
  return false;
}

int cgroup_cpus() {
  int cpus = kMaxThreads;
  for (const std::string& line : read_lines("/proc/self/cgroup")) {
    // "hierarchy:controllers:path"; no controllers in version 2.
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers.empty()) {
      cpus = std::min(cpus, smallest_quota("/sys/fs/cgroup", group, cgroup_v2_cpus));
    } else if (names_cpu(controllers)) {
      cpus = std::min(cpus, smallest_quota("/sys/fs/cgroup/cpu", group, cgroup_v1_cpus));
    }
  }
  return cpus;
}

int default_num_threads() {
  if (const char* text = std::getenv("TINYVLLM_NUM_THREADS")) {
    const int n = std::atoi(text);
    if (n > 0) return std::min(n, kMaxThreads);
  }
  return std::min({affinity_cpus(), cgroup_cpus(), kMaxThreads});
}

thread_local bool t_in_region = false;

// A region's life, in `state_`:
//
//   [ open : 1 | epoch : 19 | joined : 12 ]
//
//   caller: fill job_, store {open, epoch+1, 0}   claim ranges    clear open, wait for joined == 0
//   worker:            see open and a new epoch, CAS joined+1,    claim ranges,      joined-1
//
// job_ is written only while the region is closed and nobody is joined, and read only by those who
// are joined, so it needs no atomics but `next`. A worker that wakes late finds the region closed
// (or its CAS fails) and goes back to sleep: nobody waits for it.
class ThreadPool {
 public:
  int num_threads() {
    int n = num_threads_.load(std::memory_order_relaxed);
    if (n == 0) {
      int unset = 0;
      n = default_num_threads();
      if (!num_threads_.compare_exchange_strong(unset, n)) n = unset;
    }
    return n;
  }

  void set_num_threads(int n) {
    const std::lock_guard<std::mutex> one_region(region_mutex_);
    num_threads_.store(std::clamp(n, 1, kMaxThreads));
    {
      const std::lock_guard<std::mutex> lock(sleep_mutex_);
    }
    wake_.notify_all();
    while (static_cast<int>(workers_.size()) > num_threads() - 1) {
      workers_.back().join();
      workers_.pop_back();
    }
  }

  void run(int64_t n, int64_t grain, detail::ParallelBody body, void* context) {
    const std::lock_guard<std::mutex> one_region(region_mutex_);
    const int threads = num_threads();
    start_workers(threads - 1);
    job_.body = body;
    job_.context = context;
    job_.n = n;
    job_.grain = grain;
    job_.threads = threads;
    job_.error = nullptr;
    job_.next.store(0, std::memory_order_relaxed);

    const uint32_t epoch = (state_.load(std::memory_order_relaxed) + kEpochOne) & kEpochMask;
    state_.store(kOpen | epoch, std::memory_order_seq_cst);
    wake_workers((n + grain - 1) / grain - 1);

    t_in_region = true;
    claim_ranges();
    t_in_region = false;

    uint32_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int looks = 0; (state & kJoinedMask) != 0; ++looks) {
      // A joined worker holds a range; if it lost its core to us, yielding gives it back.
      if (looks < kLooksBeforeYield) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
      state = state_.load(std::memory_order_acquire);
    }
    if (job_.error != nullptr) std::rethrow_exception(std::exchange(job_.error, nullptr));
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr uint32_t kJoinedMask = 0xfff;
  static constexpr uint32_t kEpochOne = kJoinedMask + 1;
  static constexpr uint32_t kEpochMask = ~(kOpen | kJoinedMask);

  struct Job {
    detail::ParallelBody body;
    void* context;
    int64_t n;
    int64_t grain;
    int64_t threads;
    std::mutex error_mutex;
    std::exception_ptr error;
    alignas(64) std::atomic<int64_t> next{0};
  };

  // Takes half a fair share of what is left, in whole grains, until nothing is left.
  void claim_ranges() {
    const int64_t n = job_.n;
    const int64_t grain = job_.grain;
    int64_t begin = job_.next.load(std::memory_order_relaxed);
    while (begin < n) {
      const int64_t share = (n - begin) / (2 * job_.threads) / grain * grain;
      const int64_t end = std::min(n, begin + std::max(share, grain));
      if (!job_.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      try {
        job_.body(job_.context, begin, end);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(job_.error_mutex);
        if (job_.error == nullptr) job_.error = std::current_exception();
        job_.next.store(n, std::memory_order_relaxed);
      }
      begin = job_.next.load(std::memory_order_relaxed);
    }
  }

  void start_workers(int wanted) {
    if (static_cast<int>(workers_.size()) >= wanted) return;
    // Workers take no signals: one that is delivered here would not interrupt the main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        const int index = static_cast<int>(workers_.size());
        const uint32_t epoch = state_.load(std::memory_order_relaxed) & kEpochMask;
        workers_.emplace_back([this, index, epoch] { work(index, epoch); });
      }
    } catch (const std::system_error&) {
      // The system has no thread left for us: go on with those that we have.
      num_threads_.store(static_cast<int>(workers_.size()) + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Pairs with sleep(): either this sees the sleeper, or the sleeper sees the open region.
  void wake_workers(int64_t useful) {
    const int64_t asleep = sleepers_.load(std::memory_order_seq_cst);
    if (asleep == 0) return;
    {
      const std::lock_guard<std::mutex> lock(sleep_mutex_);
    }
    if (useful >= asleep) {
      wake_.notify_all();
    } else {
      for (int64_t i = 0; i < useful; ++i) wake_.notify_one();
    }
  }

  bool surplus(int index) const {
    return index >= num_threads_.load(std::memory_order_relaxed) - 1;
  }
  static bool is_new(uint32_t state, uint32_t seen) {
    return (state & kOpen) != 0 && (state & kEpochMask) != seen;
  }

  void work(int index, uint32_t seen) {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "tinyvllm-cpu");
#endif
    t_in_region = true;  // a nested parallel_for in a body runs inline
    while (!surplus(index)) {
      uint32_t state = state_.load(std::memory_order_acquire);
      if (!is_new(state, seen)) {
        if (!spin(index, seen)) sleep(index, seen);
        continue;
      }
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      seen = state & kEpochMask;
      claim_ranges();
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  // True as soon as there is a new region; false after kSpin without one.
  bool spin(int index, uint32_t seen) const {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    for (int looks = 1;; ++looks) {
      if (is_new(state_.load(std::memory_order_relaxed), seen)) return true;
      if (looks < kLooksBeforeYield) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
      if (looks % kLooksPerClockRead == 0 &&
          (surplus(index) || std::chrono::steady_clock::now() > until)) {
        return false;
      }
    }
  }

  void sleep(int index, uint32_t seen) {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] {
      return surplus(index) || is_new(state_.load(std::memory_order_seq_cst), seen);
    });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) Job job_;
  std::atomic<int> num_threads_{0};  // 0: not determined yet
  std::atomic<int64_t> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::mutex region_mutex_;
  std::vector<std::thread> workers_;  // guarded by region_mutex_
};

// Never destroyed: workers may be asleep in it when the process exits. A forked child has none of
// its threads and perhaps a locked mutex, so it forgets the pool and makes its own on first use.
std::atomic<ThreadPool*> g_pool{nullptr};

void forget_pool_in_child() {
  g_pool.store(nullptr, std::memory_order_relaxed);
  t_in_region = false;
}

ThreadPool& pool() {
  ThreadPool* current = g_pool.load(std::memory_order_acquire);
  if (current == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
    (void)registered;
    auto fresh = std::make_unique<ThreadPool>();
    if (g_pool.compare_exchange_strong(current, fresh.get(), std::memory_order_acq_rel)) {
      current = fresh.release();
    }
  }
  return *current;
}

}  // namespace

int num_threads() { return pool().num_threads(); }

void set_num_threads(int n) { pool().set_num_threads(n); }

void detail::run_parallel(int64_t n, int64_t grain, ParallelBody body, void* context) {
  grain = std::max<int64_t>(grain, 1);
  if (t_in_region || num_threads() == 1 || n <= grain) {
    body(context, 0, n);
    return;
  }
  pool().run(n, grain, body, context);
}

}  // namespace tinyvllm::cpu
