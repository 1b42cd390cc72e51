// out[r] = x[row_idx[r]]: picks the tokens whose logits are wanted. One row copy each.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "check_indices.h"
#include "ops.h"
#include "thread_pool.h"

namespace tinyvllm::cpu {

void gather_rows(const Tensor& out, const Tensor& x, const Tensor& row_idx) {
  check_indices("gather_rows", "row_idx", row_idx, 0, x.shape[0]);
  const int64_t hidden_size = out.shape[1];
  const int32_t* rows = row_idx.ptr<int32_t>();
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, hidden_size));
  parallel_for(out.shape[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(out.ptr<uint16_t>() + r * out.strides[0],
                  x.ptr<uint16_t>() + rows[r] * x.strides[0], hidden_size * sizeof(uint16_t));
    }
  });
}

}  // namespace tinyvllm::cpu
