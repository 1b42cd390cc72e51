// out[r] = x[row_idx[r]].             out [R,H], x [T,H] bf16, row_idx [R] i32
//
// One block copies one row, 16 bytes a thread and turn.
#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

struct Params {
  __nv_bfloat16* out;      // [R, hidden_size], out_stride apart
  const int32_t* row_idx;  // [R]
  const __nv_bfloat16* x;  // [num_rows, hidden_size], x_stride apart
  int64_t out_stride, x_stride;
  int64_t num_rows, hidden_size;
};

template <int kVec>
__global__ void gather_rows_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t to = blockIdx.x, from = p.row_idx[to];
  __nv_bfloat16* out = p.out + to * p.out_stride;
  if (from >= 0 && from < p.num_rows) {
    copy_row<kVec>(out, p.x + from * p.x_stride, p.hidden_size);
  } else {
    fill_row_nan(out, p.hidden_size);
  }
}

}  // namespace

void gather_rows(const Tensor& out, const Tensor& x, const Tensor& row_idx, Stream stream) {
  if (out.numel() == 0) return;
  const Params p{out.ptr<__nv_bfloat16>(),
                 row_idx.ptr<int32_t>(),
                 x.ptr<__nv_bfloat16>(),
                 out.strides[0],
                 x.strides[0],
                 x.shape[0],
                 out.shape[1]};
  const bool vec = vectorizable(p.hidden_size, {&out, &x});
  const auto kernel = vec ? gather_rows_kernel<8> : gather_rows_kernel<1>;
  launch_early("gather_rows", kernel, dim3(static_cast<unsigned>(out.shape[0])),
               threads_for(p.hidden_size, vec ? 8 : 1), 0, stream, p);
}

}  // namespace tinyvllm::cuda
