// Takes every decoding sequence from one step to the next, on the device: its drawn token becomes
// its input, its lengths grow by one, and its KV slot follows from its block table.
//
// One thread a sequence. A position outside of the table stores nothing (slot -1).
#include <cstdint>

#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kThreads = 128;

struct Params {
  int32_t *input_ids, *positions, *seq_lens, *step_idx, *slot_mapping;  // [num_seqs]
  const int32_t* token_ids;                                             // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, max_blocks], table_stride apart
  int64_t table_stride, max_blocks, num_seqs;
  int block_size;
};

__global__ void advance_decode_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t s = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (s >= p.num_seqs) return;
  p.input_ids[s] = p.token_ids[s];
  const int32_t position = ++p.positions[s];
  ++p.seq_lens[s];
  ++p.step_idx[s];
  const bool inside = position >= 0 && position < p.max_blocks * p.block_size;
  const int32_t* table = p.block_tables + s * p.table_stride;
  p.slot_mapping[s] =
      inside ? table[position / p.block_size] * p.block_size + position % p.block_size : -1;
}

}  // namespace

void advance_decode(const Tensor& input_ids, const Tensor& positions, const Tensor& seq_lens,
                    const Tensor& step_idx, const Tensor& slot_mapping, const Tensor& token_ids,
                    const Tensor& block_tables, int block_size, Stream stream) {
  const int64_t num_seqs = input_ids.shape[0];
  if (num_seqs == 0) return;
  const Params p{input_ids.ptr<int32_t>(),
                 positions.ptr<int32_t>(),
                 seq_lens.ptr<int32_t>(),
                 step_idx.ptr<int32_t>(),
                 slot_mapping.ptr<int32_t>(),
                 token_ids.ptr<int32_t>(),
                 block_tables.ptr<int32_t>(),
                 block_tables.strides[0],
                 block_tables.shape[1],
                 num_seqs,
                 block_size};
  const auto blocks = static_cast<unsigned>((num_seqs + kThreads - 1) / kThreads);
  launch_early("advance_decode", advance_decode_kernel, dim3(blocks), kThreads, 0, stream, p);
}

}  // namespace tinyvllm::cuda
