// Takes every decoding sequence from one step to the next, on the device: its drawn token becomes
// its input, its lengths grow by one, and its KV slot follows from its block table.
//
// One thread a sequence. A position outside of the table stores nothing (slot -1).
#include <cstdint>

#include "device.h"
#include "ops.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void advance_decode_kernel(int32_t* input_ids, int32_t* positions, int32_t* seq_lens,
                                      int32_t* step_idx, int32_t* slot_mapping,
                                      const int32_t* token_ids, const int32_t* block_tables,
                                      int64_t table_stride, int64_t max_blocks, int64_t num_seqs,
                                      int block_size) {
  const int64_t s = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (s >= num_seqs) return;
  input_ids[s] = token_ids[s];
  const int32_t position = ++positions[s];
  ++seq_lens[s];
  ++step_idx[s];
  const bool inside = position >= 0 && position < max_blocks * block_size;
  slot_mapping[s] = inside ? block_tables[s * table_stride + position / block_size] * block_size +
                                 position % block_size
                           : -1;
}

}  // namespace

void advance_decode(const Tensor& input_ids, const Tensor& positions, const Tensor& seq_lens,
                    const Tensor& step_idx, const Tensor& slot_mapping, const Tensor& token_ids,
                    const Tensor& block_tables, int block_size, Stream stream) {
  const int64_t num_seqs = input_ids.shape[0];
  if (num_seqs == 0) return;
  advance_decode_kernel<<<(num_seqs + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      input_ids.ptr<int32_t>(), positions.ptr<int32_t>(), seq_lens.ptr<int32_t>(),
      step_idx.ptr<int32_t>(), slot_mapping.ptr<int32_t>(), token_ids.ptr<int32_t>(),
      block_tables.ptr<int32_t>(), block_tables.strides[0], block_tables.shape[1], num_seqs,
      block_size);
  check_launch("advance_decode");
}

}  // namespace tinyvllm::cuda
