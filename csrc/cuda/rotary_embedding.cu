// Rotary embedding of q and k in place (HF half-split layout), and the store of k and v into their
// cache slots.
//
//   x1' = x1 * cos - x2 * sin,   x2' = x2 * cos + x1 * sin        x1, x2: first and second half
//
// q [T,num_heads,D], k, v [T,num_kv_heads,D] bf16; k_cache, v_cache [num_blocks,block_size,
// num_kv_heads,D]; cos_sin [max_model_len,D] f32; positions, slot_mapping [T] i32.
//
// One block per token. Its threads go over the pairs of vectors of all heads (q's, then k's), then
// over the vectors of v. Products are rounded one by one, not fused: the same bits as the
// reference.
#include "device.h"
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
__global__ void rotary_embedding_store_kv_kernel(const Params p) {
  const int64_t t = blockIdx.x;
  const int64_t position = p.positions[t], slot = p.slot_mapping[t];
  const bool stores = slot >= 0 && slot < p.num_slots;
  if (position < 0 || position >= p.max_model_len) return;
  const int half = p.head_dim / 2, vecs = half / kVec;
  const int64_t kv_size = static_cast<int64_t>(p.num_kv_heads) * p.head_dim;
  const float* cos = p.cos_sin + position * p.head_dim;

  for (int pair = threadIdx.x; pair < (p.num_heads + p.num_kv_heads) * vecs; pair += blockDim.x) {
    const int head = pair / vecs, i = pair % vecs * kVec;
    const bool is_q = head < p.num_heads;
    const int64_t at = static_cast<int64_t>(is_q ? head : head - p.num_heads) * p.head_dim + i;
    __nv_bfloat16* x = is_q ? p.q + t * p.q_stride + at : p.k + t * p.k_stride + at;
    float x1[kVec], x2[kVec];
    load(x1, x);
    load(x2, x + half);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float c = cos[i + j], s = cos[half + i + j], first = x1[j];
      x1[j] = __fsub_rn(__fmul_rn(first, c), __fmul_rn(x2[j], s));
      x2[j] = __fadd_rn(__fmul_rn(x2[j], c), __fmul_rn(first, s));
    }
    store(x, x1);
    store(x + half, x2);
    if (!is_q && stores) {
      store(p.k_cache + slot * kv_size + at, x1);
      store(p.k_cache + slot * kv_size + at + half, x2);
    }
  }
  if (stores) copy_row<kVec>(p.v_cache + slot * kv_size, p.v + t * p.v_stride, kv_size);
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
  const int64_t pairs =
      static_cast<int64_t>(params.num_heads + params.num_kv_heads) * (params.head_dim / 2);
  kernel<<<q.shape[0], threads_for(pairs, vec ? 8 : 1), 0, stream>>>(params);
  check_launch("rotary_embedding_store_kv");
}

}  // namespace tinyvllm::cuda
