// The last, partial block of a bf16 row, as a block of 16: what is missing reads as zero and is not
// written. Follows simd.h in the kernel half of a file (see isa.h).
#ifndef TINYVLLM_ISA
#ifndef TINYVLLM_CPU_SIMD_TAIL_H
#define TINYVLLM_CPU_SIMD_TAIL_H

#include <cstring>

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

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#endif
