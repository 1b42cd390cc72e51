// The instructions of a tensor-core kernel that runs on sm_80 and everything after it: 16-byte
// copies into shared memory, matrix fragments out of it, and mma.m16n8k16 on bf16.
//
// Shared tiles are rows of 16-byte chunks, 8 or 16 of them, stored at place chunk ^ (row % 8): the
// eight rows of a chunk that ldmatrix reads together then lie in eight different bank groups.
//
// Fragments of the product c [16,8] += a [16,16] b [16,8]. Lane 4 * g + t holds
//
//   a   row g: columns 2t, 2t+1 | row g+8: the same | row g: 2t+8, 2t+9 | row g+8: 2t+8, 2t+9
//   b   column g: rows 2t, 2t+1 | rows 2t+8, 2t+9
//   c   row g: columns 2t, 2t+1 | row g+8: the same
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace tinyvllm::cuda {

using Fragment4 = uint32_t[4];  // eight bf16 of a lane

// Copies 16 bytes into shared memory, to be waited for.
__device__ __forceinline__ void copy_16_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same; without `valid` writes zeros, reads nothing.
__device__ __forceinline__ void copy_16_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Closes this thread's current group of copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most kPending of this thread's groups are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices; lanes 8i .. 8i+7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(Fragment4& r, uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(Fragment4& r, uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment4& a, uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to bf16; `low` goes to the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x to about 2 ulp; 2^0 is 1 and 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tinyvllm::cuda
