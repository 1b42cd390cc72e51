// out[t] = weight[input_ids[t]]: one row copy a token.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "check_indices.h"
#include "ops.h"
#include "thread_pool.h"

namespace tinyvllm::cpu {

void embedding(const Tensor& out, const Tensor& input_ids, const Tensor& weight) {
  check_indices("embedding", "input_ids", input_ids, 0, weight.shape[0]);
  const int64_t hidden_size = out.shape[1];
  const int32_t* ids = input_ids.ptr<int32_t>();
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, hidden_size));
  parallel_for(out.shape[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(out.ptr<uint16_t>() + t * out.strides[0],
                  weight.ptr<uint16_t>() + ids[t] * weight.strides[0],
                  hidden_size * sizeof(uint16_t));
    }
  });
}

}  // namespace tinyvllm::cpu
