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
  volatile uint64_t* words;  // [num_rows, max_tokens]
  uint32_t* num_steps;
  const int32_t* token_ids;  // [num_tokens]
  int64_t num_tokens, max_tokens;
  uint32_t num_rows;
  bool after_copies;
};

// One block. A step without tokens says with its first word that it is over.
__global__ void publish_tokens_kernel(const __grid_constant__ Params p) {
  wait_for_previous_kernels();
  if (p.after_copies) __threadfence_system();
  const uint32_t step = *p.num_steps + 1;
  volatile uint64_t* row = p.words + step % p.num_rows * p.max_tokens;
  for (int64_t i = threadIdx.x; i < p.num_tokens || i == 0; i += kThreads) {
    const uint32_t token = i < p.num_tokens ? static_cast<uint32_t>(p.token_ids[i]) : 0;
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

void publish_tokens(const Tensor& words, const Tensor& num_steps, const Tensor& token_ids,
                    bool after_copies, Stream stream) {
  void* mapped = nullptr;
  check(cudaHostGetDevicePointer(&mapped, words.data, 0));
  const Params p{static_cast<uint64_t*>(mapped),
                 num_steps.ptr<uint32_t>(),
                 token_ids.ptr<int32_t>(),
                 token_ids.shape[0],
                 words.shape[1],
                 static_cast<uint32_t>(words.shape[0]),
                 after_copies};
  launch_early("publish_tokens", publish_tokens_kernel, dim3(1), kThreads, 0, stream, p);
}

std::vector<int32_t> wait_for_tokens(const Tensor& words, uint32_t step, int64_t count,
                                     Stream stream) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::milliseconds(2);
  const auto num_rows = static_cast<uint32_t>(words.shape[0]);
  uint64_t* row = words.ptr<uint64_t>() + step % num_rows * words.shape[1];
  const auto load = [row](int64_t i) {
    return std::atomic_ref<uint64_t>(row[i]).load(std::memory_order_acquire);
  };
  const auto is_there = [&](int64_t i) { return load(i) >> 32 == step; };
  std::vector<int32_t> tokens(count);
  auto look_at = Clock::now() + kPatience;
  unsigned num_looks = 0;
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
