// Takes every decoding sequence from one step to the next: its drawn token becomes its input, and
// its lengths grow by one. A few loads and stores a sequence, so one thread does it.
#include <cstdint>

#include "check_indices.h"
#include "ops.h"

namespace tinyvllm::cpu {

void advance_decode(const Tensor& input_ids, const Tensor& positions, const Tensor& seq_lens,
                    const Tensor& step_idx, const Tensor& slot_mapping, const Tensor& token_ids,
                    const Tensor& block_tables, int block_size) {
  // The position before the step: one less than a table holds.
  check_indices("advance_decode", "positions", positions, -1,
                block_tables.shape[1] * block_size - 1);
  for (int64_t s = 0; s < input_ids.shape[0]; ++s) {
    input_ids.ptr<int32_t>()[s] = token_ids.ptr<int32_t>()[s];
    const int32_t position = ++positions.ptr<int32_t>()[s];
    ++seq_lens.ptr<int32_t>()[s];
    ++step_idx.ptr<int32_t>()[s];
    const int32_t* table = block_tables.ptr<int32_t>() + s * block_tables.strides[0];
    slot_mapping.ptr<int32_t>()[s] =
        table[position / block_size] * block_size + position % block_size;
  }
}

}  // namespace tinyvllm::cpu
