#include "token_mailbox.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "async_copy.cuh"
#include "launch.cuh"

namespace tinyvllm::cuda {
namespace {

constexpr int kThreads = 256;

struct Params {
  volatile uint64_t* words;  // [num_stages, max_rows]
  uint32_t* num_steps;
  const int32_t* token_ids;  // [num_rows]
  int64_t num_rows, max_rows;
  uint32_t num_stages;
};

// One block. A step without tokens says with its first word that it is over.
__global__ void publish_kernel(const __grid_constant__ Params p) {
  wait_for_previous_kernels();
  const uint32_t step = *p.num_steps + 1;
  volatile uint64_t* row = p.words + (step % p.num_stages) * p.max_rows;
  for (int64_t i = threadIdx.x; i < p.num_rows || i == 0; i += kThreads) {
    const uint32_t token = i < p.num_rows ? static_cast<uint32_t>(p.token_ids[i]) : 0;
    row[i] = static_cast<uint64_t>(step) << 32 | token;
  }
  __syncthreads();  // everyone has read the number
  if (threadIdx.x == 0) *p.num_steps = step;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("token mailbox: ") + cudaGetErrorString(error));
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

TokenMailbox::TokenMailbox(int64_t max_rows, int num_stages)
    : max_rows_(max_rows), num_stages_(num_stages) {
  const size_t bytes = sizeof(uint64_t) * max_rows * num_stages;
  check(cudaHostAlloc(reinterpret_cast<void**>(&words_), bytes, cudaHostAllocMapped));
  const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&num_steps_), sizeof(uint32_t));
  if (error != cudaSuccess) cudaFreeHost(words_);
  check(error);
  for (int64_t i = 0; i < max_rows * num_stages; ++i) words_[i] = 0;
  check(cudaMemset(num_steps_, 0, sizeof(uint32_t)));
}

TokenMailbox::~TokenMailbox() {
  cudaFree(num_steps_);  // waits for the kernels that use it
  cudaFreeHost(words_);
}

void TokenMailbox::publish(const Tensor& token_ids, Stream stream) {
  void* words = nullptr;
  check(cudaHostGetDevicePointer(&words, words_, 0));
  const Params p{static_cast<uint64_t*>(words),
                 num_steps_,
                 token_ids.ptr<int32_t>(),
                 token_ids.shape[0],
                 max_rows_,
                 static_cast<uint32_t>(num_stages_)};
  launch_early("publish", publish_kernel, dim3(1), kThreads, 0, stream, p);
}

std::vector<int32_t> TokenMailbox::wait(uint32_t step, int64_t count, Stream stream) const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::milliseconds(2);
  const uint64_t* row = words_ + (step % num_stages_) * max_rows_;
  const auto load = [row](int64_t i) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(row[i])).load(std::memory_order_acquire);
  };
  const auto is_there = [&](int64_t i) { return load(i) >> 32 == step; };
  std::vector<int32_t> tokens(count);
  auto look_at = Clock::now() + kPatience;
  int num_looks = 0;
  for (int64_t i = 0; i < count || i == 0; ++i) {
    while (!is_there(i)) {
      pause();
      if (++num_looks % 256 != 0) continue;
      std::this_thread::yield();  // the readers' loop may have no core but this one
      if (Clock::now() < look_at) continue;
      // A kernel that fails publishes nothing.
      const cudaError_t state = cudaStreamQuery(stream);
      if (state == cudaErrorNotReady) {
        look_at = Clock::now() + kPatience;
        continue;
      }
      check(state);
      if (!is_there(i)) {
        throw std::runtime_error("token mailbox: step " + std::to_string(step) +
                                 " has ended without its tokens");
      }
    }
    if (i < count) tokens[i] = static_cast<int32_t>(static_cast<uint32_t>(load(i)));
  }
  return tokens;
}

}  // namespace tinyvllm::cuda
