// Gives a step the tokens that the last one drew: a decode whose token the host has not seen.
#include <cstdint>

#include "check_indices.h"
#include "ops.h"

namespace tinyvllm::cpu {

void take_drawn(const Tensor& input_ids, const Tensor& token_ids, const Tensor& source_rows) {
  check_indices("take_drawn", "source_rows", source_rows, -1, token_ids.shape[0]);
  for (int64_t t = 0; t < input_ids.shape[0]; ++t) {
    const int32_t row = source_rows.ptr<int32_t>()[t];
    if (row >= 0) input_ids.ptr<int32_t>()[t] = token_ids.ptr<int32_t>()[row];
  }
}

}  // namespace tinyvllm::cpu
