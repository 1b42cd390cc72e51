// RMS norm: out = x * (1 / sqrt(mean(x^2) + eps)) * weight.
//
// A row is read twice, the second time from L1. Sixteen partial sums, then one fixed tree: a row
// gives the same bits whatever the other rows are.
#ifdef TINYVLLM_ISA

#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

void rms_norm_kernel(bf16_t* out, const bf16_t* x, const bf16_t* weight, int64_t n, float eps) {
  F16 sum = zero16();
  for (int64_t i = 0; i < n; i += 16) {
    const F16 v = load_bf16(x + i, n - i);
    sum = add(sum, mul(v, v));
  }
  const F16 scale = set16(1.0f / __builtin_sqrtf(reduce_add(sum) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const F16 normed = mul(load_bf16(x + i, n - i), scale);
    store_bf16(out + i, mul(normed, load_bf16(weight + i, n - i)), n - i);
  }
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "ops.h"
#include "simd.h"
#include "simd_tail.h"
#include "thread_pool.h"

#define TINYVLLM_ISA_FILE "rms_norm.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {
namespace {

// Rows that are worth a visit by another thread: about two microseconds of work.
int64_t rows_per_grain(int64_t n) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, n)); }

}  // namespace

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, float eps) {
  const bool per_head = x.ndim == 3;
  const int64_t heads = per_head ? x.shape[1] : 1;
  const int64_t n = x.shape[x.ndim - 1];
  const auto kernel = TINYVLLM_DISPATCH(rms_norm_kernel);
  parallel_for(x.shape[0] * heads, rows_per_grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t t = row / heads, h = row % heads;
      const int64_t out_at = t * out.strides[0] + (per_head ? h * out.strides[1] : 0);
      const int64_t x_at = t * x.strides[0] + (per_head ? h * x.strides[1] : 0);
      kernel(out.ptr<bf16_t>() + out_at, x.ptr<bf16_t>() + x_at, weight.ptr<bf16_t>(), n, eps);
    }
  });
}

}  // namespace tinyvllm::cpu

#endif
