// The linear of many tokens: a tiled product on the tensor cores, straight from packed weights.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops.h"

namespace tinyvllm::cuda {

enum class GemmEpilogue : uint8_t {
  kStore,  // out = acc + bias
  kAdd,    // out = out + acc + bias, rounded once: the residual stream in place. bf16 alone
  kGate,   // out = silu(gate + its bias) * (up + its bias), rounded once. bf16 alone
};

struct GemmParams {
  void* out;                  // [t, n] bf16, or f32 if out_is_float; out_stride apart
  const __nv_bfloat16* x;     // [t, k], x_stride apart
  const void* packed;         // [strips, ceil(k/32), 1 KiB] (linear.cu). A strip is 16 rows of the
                              // weight; for kGate 8 rows of gate, then the same 8 rows of up
  const __nv_bfloat16* bias;  // [n], for kGate [2, n], or nullptr
  int64_t out_stride, x_stride;  // in elements
  int t, n, k;                   // n: columns of out, so ceil(n/16) strips, for kGate ceil(n/8)
  bool out_is_float;
  GemmEpilogue epilogue;
};

// Launches one kernel; t, n or k of 0 are legal. Any alignment is right; x with 16-byte aligned
// rows is fast. The bits of a row depend on n, k and the epilogue alone, not on t or the other
// rows: there is one order of summation. `packed` must be constant, as for `linear`: it is read
// before the kernels ahead in the stream have ended. Allocates nothing, never synchronizes.
void gemm(const GemmParams& params, Stream stream);

}  // namespace tinyvllm::cuda
