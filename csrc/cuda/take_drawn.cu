// Gives a step the tokens that the last one drew: a decode whose token the host has not seen.
//
// One thread a token. A row outside of token_ids changes nothing.
#include <cstdint>

#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kThreads = 128;

struct Params {
  int32_t* input_ids;          // [num_tokens]
  const int32_t* token_ids;    // [num_rows]
  const int32_t* source_rows;  // [num_tokens]
  int64_t num_tokens, num_rows;
};

__global__ void take_drawn_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t t = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (t >= p.num_tokens) return;
  const int32_t row = p.source_rows[t];
  if (row >= 0 && row < p.num_rows) p.input_ids[t] = p.token_ids[row];
}

}  // namespace

void take_drawn(const Tensor& input_ids, const Tensor& token_ids, const Tensor& source_rows,
                Stream stream) {
  const int64_t num_tokens = input_ids.shape[0];
  if (num_tokens == 0) return;
  const Params p{input_ids.ptr<int32_t>(), token_ids.ptr<int32_t>(), source_rows.ptr<int32_t>(),
                 num_tokens, token_ids.shape[0]};
  const auto blocks = static_cast<unsigned>((num_tokens + kThreads - 1) / kThreads);
  launch_early("take_drawn", take_drawn_kernel, dim3(blocks), kThreads, 0, stream, p);
}

}  // namespace tinyvllm::cuda
