// Every op of the engine, declared once. cpu/x.cpp and cuda/x.cu define the twins; ops/reference.py
// is the specification. Argument order: outputs, inputs, index tensors, scalars, stream.
// Shapes: T tokens, S sequences, R rows of logits, H hidden_size, V vocab_size. "bf16" is BFloat16.
// A leading dimension of 0 is legal everywhere and does nothing.
#pragma once

#include "tensor.h"

namespace tinyvllm::cpu {

// Starts a decode step from the last one's state: input_ids[s] = token_ids[s]; positions, seq_lens
// and step_idx grow by one; slot_mapping[s] = block_tables[s][positions[s] / block_size] *
// block_size + positions[s] % block_size. All [S] i32 and updated in place; token_ids [S] i32;
// block_tables [S,max_blocks] i32.
void advance_decode(const Tensor& input_ids, const Tensor& positions, const Tensor& seq_lens,
                    const Tensor& step_idx, const Tensor& slot_mapping, const Tensor& token_ids,
                    const Tensor& block_tables, int block_size);

// input_ids[t] = token_ids[source_rows[t]] where that is not negative: tokens that the last step
// drew and the host has not seen.   input_ids, source_rows [T] i32, token_ids [R] i32
void take_drawn(const Tensor& input_ids, const Tensor& token_ids, const Tensor& source_rows);

// out[t] = weight[input_ids[t]].            out [T,H] bf16, input_ids [T] i32, weight [V,H] bf16
void embedding(const Tensor& out, const Tensor& input_ids, const Tensor& weight);

// out = x / rms(x) * weight over the last dimension. out, x [T,H] or [T,heads,head_dim] bf16, rows
// may be strided (a view of qkv), the last dimension is contiguous; out may alias x.
void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, float eps);

// Rotates q and k in place (HF half-split layout), then writes k and v to their cache slots.
// q [T,num_heads,head_dim], k, v [T,num_kv_heads,head_dim] bf16 (views of qkv, token stride free);
// k_cache, v_cache [num_blocks,block_size,num_kv_heads,head_dim] bf16; cos_sin
// [max_model_len,head_dim] f32 (cos in the first half, sin in the second); positions [T] i32;
// slot_mapping [T] i32 = block_id * block_size + offset, -1 stores nothing.
void rotary_embedding_store_kv(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos_sin,
                               const Tensor& positions, const Tensor& slot_mapping);

// Causal attention of the last `cu_seqlens_q[s+1]-cu_seqlens_q[s]` tokens of each sequence over
// its first seq_lens[s] KV entries. out, q [T,num_heads,head_dim] bf16 (token stride free);
// block_tables [S,max_blocks] i32; cu_seqlens_q [S+1] i32; seq_lens [S] i32. A query at position p
// sees keys (p - sliding_window, p]; sliding_window <= 0 means all. Entries of block_tables past
// ceil(seq_len/block_size) are never read, cache slots past seq_len never used (they may hold NaN).
// seq_len 0 with 0 queries is legal. A row's result does not depend on the other sequences or on
// how the prompt was chunked.
void paged_attention(const Tensor& out, const Tensor& q, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_tables, const Tensor& cu_seqlens_q,
                     const Tensor& seq_lens, float softmax_scale, int sliding_window);

// Rearranges weight [N,K] bf16 (row-major) into packed [ceil(N/16), ceil(K/2), 16, 2] bf16, zero
// padded: 16 output rows x 2 inputs are one 64-byte line, what vdpbf16ps eats. On a GPU packed is
// [ceil(N/16), ceil(K/32), 16, 32]: 16 output rows x 32 inputs are one tile (cuda/linear.cu).
void pack_linear(const Tensor& packed, const Tensor& weight);

// The same for gate and up projection in one: weight [2I,K] holds gate in its first half and up in
// its second, and 16 packed rows are 8 of gate and the 8 of up that belong to them:
// [ceil(I/8), ...].
void pack_gated_linear(const Tensor& packed, const Tensor& weight);

// out = x @ weight.T (+ bias).  out [T,N] bf16 or f32; x [T,K] bf16; packed as above; bias [N] bf16
// or null. fp32 accumulation in an order that does not depend on T.
void linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias);

// residual += x @ weight.T (+ bias), rounded once.          residual [T,N] bf16, the rest as above
void linear_add(const Tensor& residual, const Tensor& x, const Tensor& packed, const Tensor* bias);

// out = linear(rms_norm(x)), the norm rounded to bf16.  x [T,H] bf16, norm_weight [H] bf16, the
// rest as above. normed [T,H] bf16 is scratch: what it holds afterwards is not defined.
void norm_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                 const Tensor& norm_weight, const Tensor& packed, const Tensor* bias, float eps);

// out = silu(gate) * up, rounded once, where gate and up [T,I] are the halves of a linear of
// rms_norm(x).       out [T,I] bf16; packed by pack_gated_linear; bias [2I] bf16 (gate, up) or null
void norm_gated_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                       const Tensor& norm_weight, const Tensor& packed, const Tensor* bias,
                       float eps);

// out[r] = x[row_idx[r]].                    out [R,H], x [T,H] bf16, row_idx [R] i32
void gather_rows(const Tensor& out, const Tensor& x, const Tensor& row_idx);

// Draws token_ids[r] from logits[r]. token_ids [R] i32; logits [R,V] f32 (not changed);
// temperature, top_p, min_p [R] f32; top_k [R] i32 (<= 0: all); seeds [R] i64; step_idx [R] i32
// (the index of the output token: with the seed, the counter of Philox4x32-10). temperature 0 is
// argmax (lowest id on ties). Order of filters: temperature, top_k, top_p, min_p, as in vLLM.
void sample(const Tensor& token_ids, const Tensor& logits, const Tensor& temperature,
            const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
            const Tensor& step_idx);

// out = logits as row r's slot s = slot_idx[r] wants them, in vLLM's order: logit bias, then the
// penalties of (repetition, frequency, presence): a token of the prompt or the output is divided by
// repetition where its logit is positive, else multiplied; one of the output then loses frequency
// times its count, and presence. A token whose bit of allowed_mask is 0 becomes -inf. A row of slot
// -1 is copied. out, logits [R,V] f32 (apart); slot_idx [R] i32; penalties [S,3] f32, repetition
// > 0; output_counts [S,V] i32; prompt_mask, allowed_mask [S,ceil(V/32)] i32, bit i % 32 of word
// i / 32 for token i; bias_ids [S,B] i32 (each once; -1: none), bias_values [S,B] f32.
void adjust_logits(const Tensor& out, const Tensor& logits, const Tensor& slot_idx,
                   const Tensor& penalties, const Tensor& output_counts, const Tensor& prompt_mask,
                   const Tensor& bias_ids, const Tensor& bias_values, const Tensor& allowed_mask);

// output_counts[slot_idx[r]][token_ids[r]] += 1 for every row with a slot.
// output_counts [S,V] i32; token_ids, slot_idx [R] i32
void count_tokens(const Tensor& output_counts, const Tensor& token_ids, const Tensor& slot_idx);

// log-softmax of the logits as they come from the model, natural log: drawn[r] is that of
// token_ids[r]; values[r], ids[r] those of the num_logprobs[r] most likely tokens, highest first,
// lower id first among equals, then -inf and -1. A row with num_logprobs < 0 is skipped and not
// written. A NaN logit is never listed and weighs nothing; a row without a finite maximum has NaN
// for values. values [R,K] f32, ids [R,K] i32, K <= 20; drawn [R] f32; logits [R,V] f32; token_ids,
// num_logprobs [R] i32.
void top_logprobs(const Tensor& values, const Tensor& ids, const Tensor& drawn,
                  const Tensor& logits, const Tensor& token_ids, const Tensor& num_logprobs);
constexpr int kMaxTopLogprobs = 20;

}  // namespace tinyvllm::cpu

// The twins on a GPU: the same arguments, the stream last. They return once launched. Ops without a
// declaration here have no CUDA kernel yet. An index out of range, which the CPU ops report, gives
// a row of NaN (embedding, gather_rows, top_logprobs), stores nothing (slot_mapping, count_tokens)
// or leaves a row as it is (adjust_logits): never a wild access.
struct CUstream_st;
namespace tinyvllm::cuda {

using Stream = CUstream_st*;  // cudaStream_t

void advance_decode(const Tensor& input_ids, const Tensor& positions, const Tensor& seq_lens,
                    const Tensor& step_idx, const Tensor& slot_mapping, const Tensor& token_ids,
                    const Tensor& block_tables, int block_size, Stream stream);
void take_drawn(const Tensor& input_ids, const Tensor& token_ids, const Tensor& source_rows,
                Stream stream);
void embedding(const Tensor& out, const Tensor& input_ids, const Tensor& weight, Stream stream);
void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, float eps, Stream stream);
void rotary_embedding_store_kv(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos_sin,
                               const Tensor& positions, const Tensor& slot_mapping, Stream stream);
// packed is constant: a linear starts to read it while the kernels before it in the stream still
// run, which is safe after pack_linear and after a synchronization.
void pack_linear(const Tensor& packed, const Tensor& weight, Stream stream);
void pack_gated_linear(const Tensor& packed, const Tensor& weight, Stream stream);
void linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias,
            Stream stream);
void linear_add(const Tensor& residual, const Tensor& x, const Tensor& packed, const Tensor* bias,
                Stream stream);
void norm_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                 const Tensor& norm_weight, const Tensor& packed, const Tensor* bias, float eps,
                 Stream stream);
// norm_linear into qkv [T,(num_heads + 2 num_kv_heads) head_dim], in which heads of q, k and v
// follow each other, then rotary_embedding_store_kv of them. Afterwards q is there, k and v are in
// the cache; what their part of qkv holds is not defined.
void norm_linear_rope_store_kv(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& normed, const Tensor& x, const Tensor& norm_weight,
                               const Tensor& packed, const Tensor* bias, const Tensor& cos_sin,
                               const Tensor& positions, const Tensor& slot_mapping, float eps,
                               Stream stream);
void norm_gated_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                       const Tensor& norm_weight, const Tensor& packed, const Tensor* bias,
                       float eps, Stream stream);
void gather_rows(const Tensor& out, const Tensor& x, const Tensor& row_idx, Stream stream);
// head_dim 64 or 128, block_size a power of two from 16 on. The first call in a thread, of this or
// of sample, allocates that thread's workspace (cuda/workspace.h): make it before capturing a
// graph. block_tables, cu_seqlens_q, seq_lens and the KV of earlier steps are read while the kernel
// ahead may still run (so are positions, slot_mapping and cos_sin by rotary_embedding_store_kv):
// what writes them is not directly ahead, or is no kernel.
void paged_attention(const Tensor& out, const Tensor& q, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_tables, const Tensor& cu_seqlens_q,
                     const Tensor& seq_lens, float softmax_scale, int sliding_window,
                     Stream stream);
void sample(const Tensor& token_ids, const Tensor& logits, const Tensor& temperature,
            const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
            const Tensor& step_idx, Stream stream);
void adjust_logits(const Tensor& out, const Tensor& logits, const Tensor& slot_idx,
                   const Tensor& penalties, const Tensor& output_counts, const Tensor& prompt_mask,
                   const Tensor& bias_ids, const Tensor& bias_values, const Tensor& allowed_mask,
                   Stream stream);
void count_tokens(const Tensor& output_counts, const Tensor& token_ids, const Tensor& slot_idx,
                  Stream stream);
void top_logprobs(const Tensor& values, const Tensor& ids, const Tensor& drawn,
                  const Tensor& logits, const Tensor& token_ids, const Tensor& num_logprobs,
                  Stream stream);

}  // namespace tinyvllm::cuda
