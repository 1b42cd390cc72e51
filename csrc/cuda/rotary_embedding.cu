// Rotary embedding of q and k in place (HF half-split layout), and the store of k and v into their
// cache slots.
//
//   x1' = x1 * cos - x2 * sin,   x2' = x2 * cos + x1 * sin        x1, x2: first and second half
//
// q [T,num_heads,D], k, v [T,num_kv_heads,D] bf16; k_cache, v_cache [num_blocks,block_size,
// num_kv_heads,D]; cos_sin [max_model_len,D] f32; positions, slot_mapping [T] i32.
//
// One block per token. Its threads go over the pairs of vectors of all heads: q's, k's, then v's.
// A thread keeps its place in the head, so it reads cos and sin once, while the kernel before may
// still run. Products are rounded one by one, not fused: the same bits as the reference.
#include <algorithm>

#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "vec.cuh"

namespace tinyvllm::cuda {
namespace {

struct Params {
  __nv_bfloat16* q;             // [T, num_heads, head_dim], token stride q_stride
  __nv_bfloat16* k;             // [T, num_kv_heads, head_dim], token stride k_stride
  const __nv_bfloat16* v;       // [T, num_kv_heads, head_dim], token stride v_stride
  __nv_bfloat16* k_cache;       // [num_slots, num_kv_heads, head_dim]
  __nv_bfloat16* v_cache;       // [num_slots, num_kv_heads, head_dim]
  const float* cos_sin;         // [max_model_len, head_dim]
  const int32_t* positions;     // [T]
  const int32_t* slot_mapping;  // [T]
  int64_t q_stride, k_stride, v_stride;
  int64_t num_slots, max_model_len;
  int num_heads, num_kv_heads, head_dim;
};

template <int kVec>
__global__ void rotary_embedding_store_kv_kernel(const __grid_constant__ Params p) {
  const int64_t t = blockIdx.x;
  const int half = p.head_dim / 2, vecs = half / kVec, i = threadIdx.x % vecs * kVec;
  const int64_t position = p.positions[t], slot = p.slot_mapping[t];
  const bool is_known = position >= 0 && position < p.max_model_len;
  const bool stores = slot >= 0 && slot < p.num_slots;
  float cos[kVec], sin[kVec];
  if (is_known) {
    const float* row = p.cos_sin + position * p.head_dim;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      cos[j] = row[i + j];
      sin[j] = row[half + i + j];
    }
  }
  wait_for_previous_kernels();
  let_next_kernel_start();
  if (!is_known) return;

  const int heads_at_once = blockDim.x / vecs;
  for (int head = threadIdx.x / vecs; head < p.num_heads + 2 * p.num_kv_heads;
       head += heads_at_once) {
    const bool is_q = head < p.num_heads, is_v = head >= p.num_heads + p.num_kv_heads;
    const int64_t at = static_cast<int64_t>(is_q   ? head
                                            : is_v ? head - p.num_heads - p.num_kv_heads
                                                   : head - p.num_heads) *
                           p.head_dim +
                       i;
    const __nv_bfloat16* x = is_q   ? p.q + t * p.q_stride + at
                             : is_v ? p.v + t * p.v_stride + at
                                    : p.k + t * p.k_stride + at;
    float x1[kVec], x2[kVec];
    load(x1, x);
    load(x2, x + half);
    if (!is_v) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float first = x1[j];
        x1[j] = __fsub_rn(__fmul_rn(first, cos[j]), __fmul_rn(x2[j], sin[j]));
        x2[j] = __fadd_rn(__fmul_rn(x2[j], cos[j]), __fmul_rn(first, sin[j]));
      }
      __nv_bfloat16* rotated = is_q ? p.q + t * p.q_stride + at : p.k + t * p.k_stride + at;
      store(rotated, x1);
      store(rotated + half, x2);
    }
    if (!is_q && stores) {
      const int64_t kv_size = static_cast<int64_t>(p.num_kv_heads) * p.head_dim;
      __nv_bfloat16* to = (is_v ? p.v_cache : p.k_cache) + slot * kv_size + at;
      store(to, x1);
      store(to + half, x2);
    }
  }
}

}  // namespace

void rotary_embedding_store_kv(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos_sin,
                               const Tensor& positions, const Tensor& slot_mapping, Stream stream) {
  if (q.shape[0] == 0 || q.shape[2] == 0) return;
  const Params params{q.ptr<__nv_bfloat16>(),
                      k.ptr<__nv_bfloat16>(),
                      v.ptr<__nv_bfloat16>(),
                      k_cache.ptr<__nv_bfloat16>(),
                      v_cache.ptr<__nv_bfloat16>(),
                      cos_sin.ptr<float>(),
                      positions.ptr<int32_t>(),
                      slot_mapping.ptr<int32_t>(),
                      q.strides[0],
                      k.strides[0],
                      v.strides[0],
                      k_cache.shape[0] * k_cache.shape[1],
                      cos_sin.shape[0],
                      static_cast<int>(q.shape[1]),
                      static_cast<int>(k.shape[1]),
                      static_cast<int>(q.shape[2])};
  const bool vec = vectorizable(params.head_dim / 2, {&q, &k, &v, &k_cache, &v_cache});
  const auto kernel =
      vec ? rotary_embedding_store_kv_kernel<8> : rotary_embedding_store_kv_kernel<1>;
  const int vecs = params.head_dim / 2 / (vec ? 8 : 1);
  const int threads =
      vecs * std::min(params.num_heads + 2 * params.num_kv_heads, std::max(1, 1024 / vecs));
  launch_early("rotary_embedding_store_kv", kernel, dim3(static_cast<unsigned>(q.shape[0])),
               threads, 0, stream, params);
}

}  // namespace tinyvllm::cuda
