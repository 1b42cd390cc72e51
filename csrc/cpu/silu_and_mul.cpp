// out = silu(gate) * up, where gate_up [T, 2I] holds gate in its first half and up in its second.
//
// silu(g) = g * sigmoid(g); with e = exp(-|g|), which never overflows, sigmoid is 1 / (1 + e) for
// g >= 0 and e / (1 + e) for g < 0.
#ifdef TINYVLLM_ISA

#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

void silu_and_mul_kernel(bf16_t* out, const bf16_t* gate, const bf16_t* up, int64_t n) {
  constexpr float kLog2E = 1.44269504f;
  for (int64_t i = 0; i < n; i += 16) {
    const F16 g = load_bf16(gate + i, n - i);
    const F16 magnitude = max(sub(zero16(), g), g);
    const F16 e = exp2_nonpositive(mul(magnitude, set16(-kLog2E)));
    F16 silu;
    for (int part = 0; part < kParts; ++part) {
      const auto numerator = g.v[part] < 0.0f ? g.v[part] * e.v[part] : g.v[part];
      silu.v[part] = numerator / (e.v[part] + 1.0f);
    }
    store_bf16(out + i, mul(silu, load_bf16(up + i, n - i)), n - i);
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

#define TINYVLLM_ISA_FILE "silu_and_mul.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {

void silu_and_mul(const Tensor& out, const Tensor& gate_up) {
  const int64_t n = out.shape[1];
  const auto kernel = TINYVLLM_DISPATCH(silu_and_mul_kernel);
  // Rows are cut as well as counted: one wide row is worth two threads.
  constexpr int64_t kPiece = 1024;
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  parallel_for(out.shape[0] * pieces, 8, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t t = piece / pieces, i = piece % pieces * kPiece;
      const bf16_t* gate = gate_up.ptr<bf16_t>() + t * gate_up.strides[0] + i;
      kernel(out.ptr<bf16_t>() + t * out.strides[0] + i, gate, gate + n, std::min(kPiece, n - i));
    }
  });
}

}  // namespace tinyvllm::cpu

#endif
