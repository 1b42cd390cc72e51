// Rotary embedding of q and k in place, and the store of k and v into the paged cache, in one pass
// over the tokens: k is still in L1 when it is copied.
//
// HF's half-split layout: element i of the first half pairs with element i of the second,
//   x1' = x1 * cos - x2 * sin,   x2' = x2 * cos + x1 * sin
// in fp32 with one rounding at the end (no FMA: the same bits as the reference).
#ifdef TINYVLLM_ISA

#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

// x [heads, 2 * half] contiguous; cos, sin [half].
void rotate_kernel(bf16_t* x, int64_t heads, const float* cos, const float* sin, int64_t half) {
  for (int64_t h = 0; h < heads; ++h, x += 2 * half) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
      const F16 x1 = load16_bf16(x + i), x2 = load16_bf16(x + half + i);
      const F16 c = load16(cos + i), s = load16(sin + i);
      store16_bf16(x + i, sub(mul(x1, c), mul(x2, s)));
      store16_bf16(x + half + i, add(mul(x2, c), mul(x1, s)));
    }
    for (; i < half; ++i) {
      const float x1 = bf16_to_float(x[i]), x2 = bf16_to_float(x[half + i]);
      x[i] = float_to_bf16(x1 * cos[i] - x2 * sin[i]);
      x[half + i] = float_to_bf16(x2 * cos[i] + x1 * sin[i]);
    }
  }
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "check_indices.h"
#include "isa.h"
#include "ops.h"
#include "simd.h"
#include "simd_tail.h"
#include "thread_pool.h"

#define TINYVLLM_ISA_FILE "rotary_embedding.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {

void rotary_embedding_store_kv(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos_sin,
                               const Tensor& positions, const Tensor& slot_mapping) {
  check_indices("rotary_embedding_store_kv", "positions", positions, 0, cos_sin.shape[0]);
  check_indices("rotary_embedding_store_kv", "slot_mapping", slot_mapping, -1,
                k_cache.shape[0] * k_cache.shape[1]);
  const int64_t num_heads = q.shape[1], num_kv_heads = k.shape[1], head_dim = q.shape[2];
  const int64_t half = head_dim / 2;
  const int64_t kv_size = num_kv_heads * head_dim;
  const auto rotate = TINYVLLM_DISPATCH(rotate_kernel);
  const int64_t grain =
      std::max<int64_t>(1, 16384 / std::max<int64_t>(1, num_heads * head_dim + 2 * kv_size));
  parallel_for(q.shape[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = cos_sin.ptr<float>() + positions.ptr<int32_t>()[t] * head_dim;
      const float* sin = cos + half;
      bf16_t* k_row = k.ptr<bf16_t>() + t * k.strides[0];
      rotate(q.ptr<bf16_t>() + t * q.strides[0], num_heads, cos, sin, half);
      rotate(k_row, num_kv_heads, cos, sin, half);
      const int64_t slot = slot_mapping.ptr<int32_t>()[t];
      if (slot < 0) continue;
      std::memcpy(k_cache.ptr<bf16_t>() + slot * kv_size, k_row, kv_size * sizeof(bf16_t));
      std::memcpy(v_cache.ptr<bf16_t>() + slot * kv_size, v.ptr<bf16_t>() + t * v.strides[0],
                  kv_size * sizeof(bf16_t));
    }
  });
}

}  // namespace tinyvllm::cpu

#endif
