// out = silu(gate_up[:, :I]) * gate_up[:, I:].      out [T,I], gate_up [T,2I] bf16
//
// One thread computes one vector of the output: blockIdx.x is the token, blockIdx.y the piece of
// the row. silu(g) = g / (1 + exp(-g)); exp(-g) overflows to infinity for g < -88, where g / inf is
// the zero that is wanted.
#include "device.h"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

constexpr int kThreads = 256;

template <int kVec>
__global__ void silu_and_mul_kernel(__nv_bfloat16* out, const __nv_bfloat16* gate_up,
                                    int64_t out_stride, int64_t gate_up_stride, int64_t n) {
  const int64_t t = blockIdx.x;
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kVec;
  if (i >= n) return;
  float gate[kVec], up[kVec];
  load(gate, gate_up + t * gate_up_stride + i);
  load(up, gate_up + t * gate_up_stride + n + i);
#pragma unroll
  for (int j = 0; j < kVec; ++j) up[j] *= gate[j] / (1.0f + expf(-gate[j]));
  store(out + t * out_stride + i, up);
}

}  // namespace

void silu_and_mul(const Tensor& out, const Tensor& gate_up, Stream stream) {
  if (out.numel() == 0) return;
  const int64_t n = out.shape[1];
  const bool vec = vectorizable(n, {&out, &gate_up});
  const int64_t pieces = (n + kThreads * (vec ? 8 : 1) - 1) / (kThreads * (vec ? 8 : 1));
  const dim3 grid(static_cast<unsigned>(out.shape[0]), static_cast<unsigned>(pieces));
  const auto kernel = vec ? silu_and_mul_kernel<8> : silu_and_mul_kernel<1>;
  kernel<<<grid, kThreads, 0, stream>>>(out.ptr<__nv_bfloat16>(), gate_up.ptr<__nv_bfloat16>(),
                                        out.strides[0], gate_up.strides[0], n);
  check_launch("silu_and_mul");
}

}  // namespace tinyvllm::cuda
