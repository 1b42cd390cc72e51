// RMS norm: out = x * (1 / sqrt(mean(x^2) + eps)) * weight.     [T,H] or [T,heads,head_dim]
//
// One block per row (blockIdx.x the token, .y the head), 16 bytes a thread and turn; the second
// look at the row comes from L1. The sum of squares goes through a tree whose shape depends on n
// alone: a row gives the same bits in any batch.
#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

// The sum over the block, in every thread. blockDim.x is a multiple of 32.
__device__ float block_sum(float x) {
  __shared__ float warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (lane == 0) warp_sums[warp] = x;
  __syncthreads();
  x = lane < warps ? warp_sums[lane] : 0.0f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <int kVec>
__device__ void scale_row(__nv_bfloat16* out, const __nv_bfloat16* x, const __nv_bfloat16* weight,
                          int64_t n, float sum_of_squares, float eps) {
  const float scale = 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
  for (int64_t i = threadIdx.x * kVec; i < n; i += blockDim.x * kVec) {
    float v[kVec], w[kVec];
    load(v, x + i);
    load(w, weight + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = v[j] * scale * w[j];
    store(out + i, v);
  }
}

struct Params {
  __nv_bfloat16* out;           // [T, heads, n]
  const __nv_bfloat16* x;       // the same
  const __nv_bfloat16* weight;  // [n]
  int64_t n;
  int64_t out_token_stride, out_head_stride, x_token_stride, x_head_stride;
  float eps;
};

template <int kVec>
__global__ void rms_norm_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t t = blockIdx.x, h = blockIdx.y;
  const __nv_bfloat16* row = p.x + t * p.x_token_stride + h * p.x_head_stride;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x * kVec; i < p.n; i += blockDim.x * kVec) {
    float v[kVec];
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += v[j] * v[j];
  }
  scale_row<kVec>(p.out + t * p.out_token_stride + h * p.out_head_stride, row, p.weight, p.n,
                  block_sum(sum), p.eps);
}

}  // namespace

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, float eps, Stream stream) {
  if (out.numel() == 0) return;
  const bool per_head = x.ndim == 3;
  const int64_t heads = per_head ? x.shape[1] : 1, n = x.shape[x.ndim - 1];
  const bool vec = vectorizable(n, {&out, &x, &weight});
  const auto kernel = vec ? rms_norm_kernel<8> : rms_norm_kernel<1>;
  const Params p{out.ptr<__nv_bfloat16>(),
                 x.ptr<__nv_bfloat16>(),
                 weight.ptr<__nv_bfloat16>(),
                 n,
                 out.strides[0],
                 per_head ? out.strides[1] : 0,
                 x.strides[0],
                 per_head ? x.strides[1] : 0,
                 eps};
  const dim3 grid(static_cast<unsigned>(x.shape[0]), static_cast<unsigned>(heads));
  launch_early("rms_norm", kernel, grid, threads_for(n, vec ? 8 : 1), 0, stream, p);
}

}  // namespace tinyvllm::cuda
