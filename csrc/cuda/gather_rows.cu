// out[r] = x[row_idx[r]].             out [R,H], x [T,H] bf16, row_idx [R] i32
//
// One block copies one row, 16 bytes a thread and turn.
#include "device.h"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

template <int kVec>
__global__ void gather_rows_kernel(__nv_bfloat16* out, const __nv_bfloat16* x,
                                   const int32_t* row_idx, int64_t out_stride, int64_t x_stride,
                                   int64_t num_tokens, int64_t hidden_size) {
  const int64_t r = blockIdx.x;
  const int64_t row = row_idx[r];
  if (row >= 0 && row < num_tokens) {
    copy_row<kVec>(out + r * out_stride, x + row * x_stride, hidden_size);
  } else {
    fill_row_nan(out + r * out_stride, hidden_size);
  }
}

}  // namespace

void gather_rows(const Tensor& out, const Tensor& x, const Tensor& row_idx, Stream stream) {
  const int64_t num_rows = out.shape[0], hidden_size = out.shape[1];
  if (out.numel() == 0) return;
  const bool vec = vectorizable(hidden_size, {&out, &x});
  const auto kernel = vec ? gather_rows_kernel<8> : gather_rows_kernel<1>;
  kernel<<<num_rows, threads_for(hidden_size, vec ? 8 : 1), 0, stream>>>(
      out.ptr<__nv_bfloat16>(), x.ptr<__nv_bfloat16>(), row_idx.ptr<int32_t>(), out.strides[0],
      x.strides[0], x.shape[0], hidden_size);
  check_launch("gather_rows");
}

}  // namespace tinyvllm::cuda
