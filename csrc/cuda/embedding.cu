// out[t] = weight[input_ids[t]].      out [T,H] bf16, input_ids [T] i32, weight [V,H] bf16
//
// One block copies one row, 16 bytes a thread and turn.
#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

struct Params {
  __nv_bfloat16* out;           // [T, hidden_size], out_stride apart
  const int32_t* input_ids;     // [T]
  const __nv_bfloat16* weight;  // [num_rows, hidden_size], weight_stride apart
  int64_t out_stride, weight_stride;
  int64_t num_rows, hidden_size;
};

template <int kVec>
__global__ void embedding_kernel(const __grid_constant__ Params p) {
  // In this order: a chain of early starts must not reach back over the op that writes positions,
  // lengths and tables, which rotary_embedding_store_kv and paged_attention read before they wait.
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int64_t to = blockIdx.x, from = p.input_ids[to];
  __nv_bfloat16* out = p.out + to * p.out_stride;
  if (from >= 0 && from < p.num_rows) {
    copy_row<kVec>(out, p.weight + from * p.weight_stride, p.hidden_size);
  } else {
    fill_row_nan(out, p.hidden_size);
  }
}

}  // namespace

void embedding(const Tensor& out, const Tensor& input_ids, const Tensor& weight, Stream stream) {
  if (out.numel() == 0) return;
  const Params p{out.ptr<__nv_bfloat16>(),
                 input_ids.ptr<int32_t>(),
                 weight.ptr<__nv_bfloat16>(),
                 out.strides[0],
                 weight.strides[0],
                 weight.shape[0],
                 out.shape[1]};
  const bool vec = vectorizable(p.hidden_size, {&out, &weight});
  const auto kernel = vec ? embedding_kernel<8> : embedding_kernel<1>;
  launch_early("embedding", kernel, dim3(static_cast<unsigned>(out.shape[0])),
               threads_for(p.hidden_size, vec ? 8 : 1), 0, stream, p);
}

}  // namespace tinyvllm::cuda
