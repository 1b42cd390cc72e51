// The last, partial block of a row, as a block of 16: what is missing reads as zero (a bf16) or as
// -inf (a logit) and is not written. Follows simd.h in the kernel half of a file (see isa.h).
#ifndef TINYVLLM_ISA
#ifndef TINYVLLM_CPU_SIMD_TAIL_H
#define TINYVLLM_CPU_SIMD_TAIL_H

#include <cstring>
#include <limits>

#include "simd.h"

#endif  // TINYVLLM_CPU_SIMD_TAIL_H
#else   // a pass of for_each_isa.h

namespace tinyvllm::cpu::TINYVLLM_ISA {

TINYVLLM_INLINE F16 load_bf16(const bf16_t* p, int64_t n) {
  if (n >= 16) return load16_bf16(p);
  bf16_t padded[16] = {};
  std::memcpy(padded, p, n * sizeof(bf16_t));
  return load16_bf16(padded);
}

TINYVLLM_INLINE void store_bf16(bf16_t* p, F16 a, int64_t n) {
  if (n >= 16) {
    store16_bf16(p, a);
    return;
  }
  bf16_t padded[16];
  store16_bf16(padded, a);
  std::memcpy(p, padded, n * sizeof(bf16_t));
}

// Logits [i, i + 16) of a row of n.
TINYVLLM_INLINE F16 load_logits(const float* x, int64_t i, int64_t n) {
  if (i + kLineRows <= n) return load16(x + i);
  float tail[kLineRows];
  for (int64_t j = 0; j < kLineRows; ++j) {
    tail[j] = i + j < n ? x[i + j] : -std::numeric_limits<float>::infinity();
  }
  return load16(tail);
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#endif
