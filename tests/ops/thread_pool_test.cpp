// The thread pool by itself, one check per argument; test_thread_pool.py builds and runs this,
// plainly and under ThreadSanitizer. The pool's source is included so that its quota readers can be
// called.
#include "thread_pool.cpp"  // NOLINT

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <stdexcept>

namespace {

using tinyvllm::cpu::parallel_for;
using tinyvllm::cpu::set_num_threads;

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

// Every index is visited once, whatever n, grain and the number of threads; begins are whole
// grains.
void coverage() {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (const int64_t n : {0, 1, 2, 7, 64, 1000, 1001}) {
      for (const int64_t grain : {1, 3, 16, 999, 5000}) {
        std::vector<int> visits(n, 0);
        parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          CHECK(begin % grain == 0 && begin < end && end <= n);
          CHECK(end == n || end % grain == 0);
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        for (const int count : visits) CHECK(count == 1);
      }
    }
  }
}

// Plain writes of the workers are visible to the caller, region after region.
void visibility() {
  set_num_threads(4);
  std::vector<int64_t> values(4096);
  for (int64_t round = 0; round < 2000; ++round) {
    parallel_for(4096, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = i * round;
    });
    CHECK(values[4095] == 4095 * round && values[17] == 17 * round);
  }
}

// A body's exception reaches the caller once all threads have left it, and the pool goes on.
void exceptions() {
  set_num_threads(4);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> inside{0};
    bool caught = false;
    try {
      parallel_for(1000, 1, [&](int64_t begin, int64_t) {
        inside.fetch_add(1);
        if (begin >= 500) {
          inside.fetch_sub(1);
          throw std::runtime_error("row " + std::to_string(begin));
        }
        inside.fetch_sub(1);
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()).starts_with("row ");
    }
    CHECK(caught && inside.load() == 0);
  }
  std::atomic<int64_t> sum{0};
  parallel_for(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  CHECK(sum == 100);
}

void nested() {
  set_num_threads(4);
  std::atomic<int64_t> sum{0};
  parallel_for(16, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto self = std::this_thread::get_id();
      parallel_for(100, 1, [&](int64_t b, int64_t e) {
        CHECK(std::this_thread::get_id() == self);
        sum += e - b;
      });
    }
  });
  CHECK(sum == 1600);
}

// Several engines' threads share the pool, while another resizes it.
void callers() {
  set_num_threads(3);
  std::vector<std::thread> threads;
  for (int caller = 0; caller < 4; ++caller) {
    threads.emplace_back([caller] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int64_t> out(500);
        parallel_for(500, 7, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) out[i] = i + caller;
        });
        CHECK(std::accumulate(out.begin(), out.end(), int64_t{0}) == 124750 + 500 * caller);
      }
    });
  }
  for (int round = 0; round < 100; ++round) set_num_threads(1 + round % 5);
  for (auto& thread : threads) thread.join();
  set_num_threads(100000);
  CHECK(tinyvllm::cpu::num_threads() == 1024);
  set_num_threads(1);
}

// A forked child has a pool of its own, also when the parent's was busy at that moment.
void forks() {
  set_num_threads(4);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) parallel_for(10000, 1, [](int64_t, int64_t) {});
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      std::atomic<int64_t> sum{0};
      parallel_for(1000, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
      _exit(sum == 1000 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
}

// The process exits while another thread is in a region.
void exits() {
  set_num_threads(4);
  std::thread([] {
    for (;;) parallel_for(10000, 1, [](int64_t, int64_t) {});
  }).detach();
  parallel_for(1000, 1, [](int64_t, int64_t) {});
  std::exit(0);
}

// After a region the workers look for work for a moment, then sleep: no processor time is used.
void idle() {
  set_num_threads(8);
  parallel_for(1000, 1, [](int64_t, int64_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC < 0.02);
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

void quotas() {
  using namespace tinyvllm::cpu;  // NOLINT
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / ("tinyvllm-quota-" + std::to_string(getpid()));
  write(root / "v2/cpu.max", "max 100000\n");
  write(root / "v2/a/cpu.max", "350000 100000\n");
  write(root / "v2/a/b/cpu.max", "max 100000\n");
  write(root / "v2/low/cpu.max", "50000 100000\n");
  CHECK(smallest_quota(root / "v2", "/a/b", cgroup_v2_cpus) == 3);  // a parent's counts
  CHECK(smallest_quota(root / "v2", "/", cgroup_v2_cpus) == kMaxThreads);
  CHECK(smallest_quota(root / "v2", "/low", cgroup_v2_cpus) == 1);  // never none
  CHECK(smallest_quota(root / "v2", "/gone/away", cgroup_v2_cpus) == kMaxThreads);
  write(root / "v1/g/cpu.cfs_quota_us", "250000\n");
  write(root / "v1/g/cpu.cfs_period_us", "100000\n");
  write(root / "v1/free/cpu.cfs_quota_us", "-1\n");
  write(root / "v1/free/cpu.cfs_period_us", "100000\n");
  CHECK(smallest_quota(root / "v1", "/g", cgroup_v1_cpus) == 2);
  CHECK(smallest_quota(root / "v1", "/free", cgroup_v1_cpus) == kMaxThreads);
  std::filesystem::remove_all(root);
  CHECK(names_cpu("cpu") && names_cpu("cpu,cpuacct") && names_cpu("cpuset,cpu"));
  CHECK(!names_cpu("cpuset,cpuacct") && !names_cpu("name=systemd"));
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> checks = {
      {"coverage", coverage},     {"visibility", visibility},
      {"exceptions", exceptions}, {"nested", nested},
      {"callers", callers},       {"forks", forks},
      {"exits", exits},           {"idle", idle},
      {"quotas", quotas}};
  if (argc != 2 || !checks.contains(argv[1])) return 2;
  checks.at(argv[1])();
  std::puts("ok");
  return 0;
}
