// Eight bf16 at a time: the 16-byte loads and stores of every kernel here.
//
// A kernel is compiled for kVec = 8 and kVec = 1. Eight needs every row to begin at a multiple of
// 16 bytes and to be a multiple of 8 long; `vectorizable` tells. One is for odd sizes and odd
// views.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>

#include "tensor.h"

namespace tinyvllm::cuda {

template <int kVec>
struct alignas(kVec * sizeof(__nv_bfloat16)) Vec {
  __nv_bfloat16 values[kVec];
};

// A vector of p as fp32.
template <int kVec>
__device__ __forceinline__ void load(float (&x)[kVec], const __nv_bfloat16* p) {
  const Vec<kVec> v = *reinterpret_cast<const Vec<kVec>*>(p);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = __bfloat162float(v.values[i]);
}

// Rounds to nearest, ties to even.
template <int kVec>
__device__ __forceinline__ void store(__nv_bfloat16* p, const float (&x)[kVec]) {
  Vec<kVec> v;
#pragma unroll
  for (int i = 0; i < kVec; ++i) v.values[i] = __float2bfloat16_rn(x[i]);
  *reinterpret_cast<Vec<kVec>*>(p) = v;
}

// Copies one row of n, all threads of the block together.
template <int kVec>
__device__ __forceinline__ void copy_row(__nv_bfloat16* out, const __nv_bfloat16* in, int64_t n) {
  for (int64_t i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
    *reinterpret_cast<Vec<kVec>*>(out + i) = *reinterpret_cast<const Vec<kVec>*>(in + i);
  }
}

// The mark of an index out of range.
__device__ __forceinline__ void fill_row_nan(__nv_bfloat16* out, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = __ushort_as_bfloat16(0x7fff);
}

// True when every row of these tensors, and n, allow vectors of 8 bf16.
inline bool vectorizable(int64_t n, std::initializer_list<const Tensor*> tensors) {
  if (n % 8 != 0) return false;
  for (const Tensor* t : tensors) {
    if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return false;
    for (int i = 0; i < t->ndim - 1; ++i) {
      if (t->shape[i] > 1 && t->strides[i] % 8 != 0) return false;
    }
  }
  return true;
}

// Threads for a row of n elements: whole warps, one vector each where 1024 threads allow it.
inline int threads_for(int64_t n, int vec) {
  const int64_t warps = (n / vec + 31) / 32;
  return static_cast<int>(32 * (warps < 1 ? 1 : warps > 32 ? 32 : warps));
}

}  // namespace tinyvllm::cuda
