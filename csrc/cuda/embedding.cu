// out[t] = weight[input_ids[t]].      out [T,H] bf16, input_ids [T] i32, weight [V,H] bf16
//
// One block copies one row, 16 bytes a thread and turn.
#include "device.h"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

template <int kVec>
__global__ void embedding_kernel(__nv_bfloat16* out, const int32_t* input_ids,
                                 const __nv_bfloat16* weight, int64_t out_stride,
                                 int64_t weight_stride, int64_t vocab_size, int64_t hidden_size) {
  const int64_t t = blockIdx.x;
  const int64_t id = input_ids[t];
  if (id >= 0 && id < vocab_size) {
    copy_row<kVec>(out + t * out_stride, weight + id * weight_stride, hidden_size);
  } else {
    fill_row_nan(out + t * out_stride, hidden_size);
  }
}

}  // namespace

void embedding(const Tensor& out, const Tensor& input_ids, const Tensor& weight, Stream stream) {
  const int64_t num_tokens = out.shape[0], hidden_size = out.shape[1];
  if (out.numel() == 0) return;
  const bool vec = vectorizable(hidden_size, {&out, &weight});
  const auto kernel = vec ? embedding_kernel<8> : embedding_kernel<1>;
  kernel<<<num_tokens, threads_for(hidden_size, vec ? 8 : 1), 0, stream>>>(
      out.ptr<__nv_bfloat16>(), input_ids.ptr<int32_t>(), weight.ptr<__nv_bfloat16>(),
      out.strides[0], weight.strides[0], weight.shape[0], hidden_size);
  check_launch("embedding");
}

}  // namespace tinyvllm::cuda
