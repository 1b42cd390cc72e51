// What a request asks of its logits before the draw, and what it is told about them after it;
// ../ops.h states the three ops, ../cpu/logits.cpp the layout of a slot's state.
//
//   adjust_logits   A block for 4096 tokens of a row, four at a time a thread: 16 bytes of logits
//     and, of a slot that has penalties, of counts. Then the biased tokens among the 4096 again, in
//     full. All arithmetic is rounded as written, so it has the bits of the reference.
//
//   count_tokens    A thread a row.
//
//   top_logprobs    A block of 1024 threads for each row. One pass over the row: a thread keeps the
//     first of its tokens in the order by logit and id, and the running sum of exp(x - its
//     maximum). Eight neighbours make a group; the K-th of the 128 groups' first tokens is a bound
//     that K tokens reach, so a second pass (out of L2) lists few more than K, and comparing each
//     with all puts them in order. Should one group hold so many of the first that the list
//     overflows, the row is read K times, each time for the first token after the last.
//     10 KiB of shared memory.
#include <cmath>
#include <cstdint>

#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "tensor_cores.cuh"

namespace tinyvllm::cuda {
namespace {

constexpr unsigned kAllLanes = ~0u;
constexpr float kNone = -INFINITY;

// ---- adjust_logits ------------------------------------------------------------------------------

constexpr int kAdjustThreads = 256;
constexpr int kAdjustTokens = 4096;  // of a block

struct AdjustParams {
  float* out;                   // [R, vocab_size], row stride out_stride
  const float* logits;          // the same, logits_stride
  const int32_t* slots;         // [R]
  const float* penalties;       // [S, 3]
  const int32_t* counts;        // [S, vocab_size], row stride counts_stride
  const int32_t* prompt_mask;   // [S, ceil(vocab_size / 32)], prompt_stride
  const int32_t* allowed_mask;  // the same, allowed_stride
  const int32_t* bias_ids;      // [S, num_bias], bias_ids_stride
  const float* bias_values;     // the same, bias_values_stride
  int64_t out_stride, logits_stride, counts_stride, prompt_stride, allowed_stride;
  int64_t bias_ids_stride, bias_values_stride;
  int num_slots, num_bias, vocab_size;
  bool vectors;  // every row of logits, out and counts begins at a multiple of 16 bytes
};

struct SlotState {
  float repetition, frequency, presence;
  const int32_t* counts;
  const int32_t* prompt_mask;
  const int32_t* allowed_mask;

  __device__ SlotState(const AdjustParams& p, int64_t slot)
      : repetition(p.penalties[slot * 3]),
        frequency(p.penalties[slot * 3 + 1]),
        presence(p.penalties[slot * 3 + 2]),
        counts(p.counts + slot * p.counts_stride),
        prompt_mask(p.prompt_mask + slot * p.prompt_stride),
        allowed_mask(p.allowed_mask + slot * p.allowed_stride) {}

  __device__ bool is_penalized() const {
    return repetition != 1.0f || frequency != 0.0f || presence != 0.0f;
  }
  __device__ float penalize(float x, int count, bool in_prompt) const {
    if (count > 0 || in_prompt) {
      x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    }
    if (count > 0) {
      x = __fsub_rn(__fsub_rn(x, __fmul_rn(frequency, static_cast<float>(count))), presence);
    }
    return x;
  }
};

__device__ __forceinline__ bool bit_of(const int32_t* mask, int id) {
  return (mask[id / 32] >> (id % 32) & 1) != 0;
}

// Tokens i .. i+3 of a row, i a multiple of 4: one vector, or what there is of it.
template <typename Vector, typename T>
__device__ __forceinline__ void load_four(T (&x)[4], const T* row, int i, int n, bool vector,
                                          T other) {
  if (vector && i + 4 <= n) {
    *reinterpret_cast<Vector*>(x) = *reinterpret_cast<const Vector*>(row + i);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = i + c < n ? row[i + c] : other;
  }
}

__global__ void __launch_bounds__(kAdjustThreads)
    adjust_logits_kernel(const __grid_constant__ AdjustParams p) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int n = p.vocab_size, first = blockIdx.x * kAdjustTokens;
  const int past = min(first + kAdjustTokens, n);
  const int64_t row = blockIdx.y;
  const float* logits = p.logits + row * p.logits_stride;
  float* out = p.out + row * p.out_stride;
  const int slot = p.slots[row];
  const bool adjusts = slot >= 0 && slot < p.num_slots;
  const SlotState state(p, adjusts ? slot : 0);
  const bool penalized = adjusts && state.is_penalized();

#pragma unroll
  for (int step = 0; step < kAdjustTokens / (kAdjustThreads * 4); ++step) {
    const int i = first + (step * kAdjustThreads + static_cast<int>(threadIdx.x)) * 4;
    if (i >= past) break;
    alignas(16) float x[4];
    load_four<float4>(x, logits, i, n, p.vectors, 0.0f);
    if (penalized) {
      alignas(16) int32_t counts[4];
      load_four<int4>(counts, state.counts, i, n, p.vectors, 0);
      const uint32_t prompt = static_cast<uint32_t>(state.prompt_mask[i / 32]) >> (i % 32);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = state.penalize(x[c], counts[c], (prompt >> c & 1) != 0);
    }
    if (adjusts) {
      const uint32_t allowed = static_cast<uint32_t>(state.allowed_mask[i / 32]) >> (i % 32);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = (allowed >> c & 1) != 0 ? x[c] : kNone;
    }
    if (p.vectors && i + 4 <= n) {
      *reinterpret_cast<float4*>(out + i) = *reinterpret_cast<const float4*>(x);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (i + c < n) out[i + c] = x[c];
      }
    }
  }
  if (!adjusts) return;
  __syncthreads();  // what follows writes over it
  for (int b = threadIdx.x; b < p.num_bias; b += kAdjustThreads) {
    const int id = p.bias_ids[slot * p.bias_ids_stride + b];
    if (id < first || id >= past) continue;
    float x = __fadd_rn(logits[id], p.bias_values[slot * p.bias_values_stride + b]);
    if (penalized) x = state.penalize(x, state.counts[id], bit_of(state.prompt_mask, id));
    out[id] = bit_of(state.allowed_mask, id) ? x : kNone;
  }
}

// ---- count_tokens -------------------------------------------------------------------------------

constexpr int kCountThreads = 128;

__global__ void count_tokens_kernel(int32_t* counts, const int32_t* token_ids,
                                    const int32_t* slot_idx, int64_t counts_stride,
                                    int64_t num_slots, int64_t vocab_size, int64_t num_rows) {
  const int64_t r = blockIdx.x * int64_t{kCountThreads} + threadIdx.x;
  if (r >= num_rows) return;
  const int64_t slot = slot_idx[r], id = token_ids[r];
  if (slot < 0 || slot >= num_slots || id < 0 || id >= vocab_size) return;
  atomicAdd(counts + slot * counts_stride + id, 1);
}

// ---- top_logprobs -------------------------------------------------------------------------------

using Order = unsigned long long;  // a token: the logit's order, then the id's; larger comes first

constexpr int kTopThreads = 1024;
constexpr int kTopWarps = kTopThreads / 32;
constexpr int kGroups = kTopThreads / 8;
constexpr int kMaxListed = 1024;
constexpr float kLog2E = 1.44269504f;

struct TopParams {
  float* values;                // [R, num_columns], row stride values_stride
  int32_t* ids;                 // the same, ids_stride
  float* drawn;                 // [R]
  const float* logits;          // [R, vocab_size], row stride logits_stride
  const int32_t* token_ids;     // [R]
  const int32_t* num_logprobs;  // [R]
  int64_t values_stride, ids_stride, logits_stride;
  int num_columns, vocab_size;
  bool vectors;  // every row begins at a multiple of 16 bytes
};

struct TopShared {
  Order list[kMaxListed];
  Order groups[kGroups];
  Order warp_firsts[kTopWarps];
  float warp_maxima[kTopWarps];
  double warp_sums[kTopWarps];
  Order bound;
  int num_listed;
};

// Larger for what comes first; 0, which no token has, for NaN. Both zeros are one.
__device__ __forceinline__ Order order_of(float x, int id) {
  if (isnan(x)) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  const uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Order>(rank) << 32 | (~0u - static_cast<uint32_t>(id));
}

__device__ __forceinline__ int id_of(Order order) {
  return static_cast<int>(~0u - static_cast<uint32_t>(order));
}

__device__ __forceinline__ Order larger(Order a, Order b) { return a > b ? a : b; }

// The weight of a logit to that of `largest`, neither NaN; 0 when both are -inf.
__device__ __forceinline__ float weight_of(float x, float largest) {
  return x == kNone ? 0.0f : exp2_approx((x - largest) * kLog2E);
}

// Calls f(i, x) for this thread's share of the row, four tokens a time.
template <typename F>
__device__ __forceinline__ void for_each_four(const TopParams& p, const float* row, F f) {
  for (int i = threadIdx.x * 4; i < p.vocab_size; i += kTopThreads * 4) {
    alignas(16) float x[4];
    load_four<float4>(x, row, i, p.vocab_size, p.vectors, NAN);
    f(i, x);
  }
}

// The first token of the row that comes after `last`; 0 when there is none. For all threads.
__device__ Order first_after(const TopParams& p, TopShared& shared, const float* row, Order last) {
  Order first = 0;
  for_each_four(p, row, [&](int i, const float (&x)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Order order = order_of(x[c], i + c);
      if (order < last) first = larger(first, order);
    }
  });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    first = larger(first, __shfl_xor_sync(kAllLanes, first, step));
  }
  __syncthreads();  // the last call's have been read
  if (threadIdx.x % 32 == 0) shared.warp_firsts[threadIdx.x / 32] = first;
  __syncthreads();
  first = shared.warp_firsts[0];
  for (int w = 1; w < kTopWarps; ++w) first = larger(first, shared.warp_firsts[w]);
  return first;
}

__global__ void __launch_bounds__(kTopThreads)
    top_logprobs_kernel(const __grid_constant__ TopParams p) {
  __shared__ TopShared shared;
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int64_t r = blockIdx.x;
  const int n = p.vocab_size, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  if (p.num_logprobs[r] < 0) return;
  const int wanted = min(min(p.num_logprobs[r], p.num_columns), n);
  const float* row = p.logits + r * p.logits_stride;

  Order first = 0;
  float largest = kNone, sum = 0.0f;
  for_each_four(p, row, [&](int i, const float (&x)[4]) {
    const float before = largest;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      first = larger(first, order_of(x[c], i + c));
      largest = fmaxf(largest, x[c]);  // drops a NaN
    }
    sum *= weight_of(before, largest);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum += isnan(x[c]) ? 0.0f : weight_of(x[c], largest);
  });

  float row_largest = largest;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    row_largest = fmaxf(row_largest, __shfl_xor_sync(kAllLanes, row_largest, step));
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    first = larger(first, __shfl_xor_sync(kAllLanes, first, step));
  }
  if (lane == 0) shared.warp_maxima[warp] = row_largest;
  if (lane % 8 == 0) shared.groups[thread / 8] = first;
  if (thread == 0) {
    shared.num_listed = 0;
    shared.bound = 0;
  }
  __syncthreads();
  row_largest = shared.warp_maxima[0];
  for (int w = 1; w < kTopWarps; ++w) row_largest = fmaxf(row_largest, shared.warp_maxima[w]);
  double row_sum = static_cast<double>(sum * weight_of(largest, row_largest));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, step);
  }
  if (lane == 0) shared.warp_sums[warp] = row_sum;
  if (thread < kGroups && wanted > 0) {
    const Order own = shared.groups[thread];
    int place = 0;
    for (int g = 0; g < kGroups; ++g) place += shared.groups[g] > own;
    // Tokens differ in their order, so one thread is in that place, or all there are come before.
    if (place == wanted - 1 && own != 0) shared.bound = own;
  }
  __syncthreads();
  row_sum = shared.warp_sums[0];
  for (int w = 1; w < kTopWarps; ++w) row_sum += shared.warp_sums[w];
  // Without a finite maximum there is no distribution.
  const float log_sum = isfinite(row_largest) ? static_cast<float>(log(row_sum)) : NAN;
  const auto logprob = [&](int id) { return (row[id] - row_largest) - log_sum; };
  if (thread == 0) {
    const int id = p.token_ids[r];
    p.drawn[r] = id >= 0 && id < n ? logprob(id) : NAN;
  }

  float* values = p.values + r * p.values_stride;
  int32_t* ids = p.ids + r * p.ids_stride;
  const auto put = [&](int k, Order order) {
    const int id = order == 0 ? -1 : id_of(order);
    values[k] = order == 0 ? kNone : logprob(id);
    ids[k] = id;
  };
  for (int k = wanted + thread; k < p.num_columns; k += kTopThreads) put(k, 0);
  if (wanted <= 0) return;
  const Order bound = shared.bound;
  for_each_four(p, row, [&](int i, const float (&x)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Order order = order_of(x[c], i + c);
      if (order == 0 || order < bound) continue;
      const int place = atomicAdd(&shared.num_listed, 1);
      if (place < kMaxListed) shared.list[place] = order;
    }
  });
  __syncthreads();
  const int num_listed = shared.num_listed;
  if (num_listed <= kMaxListed) {
    if (thread < num_listed) {
      const Order own = shared.list[thread];
      int place = 0;
      for (int j = 0; j < num_listed; ++j) place += shared.list[j] > own;
      if (place < wanted) put(place, own);
    } else if (thread < wanted) {
      put(thread, 0);
    }
    return;
  }
  Order last = ~Order{0};
  for (int k = 0; k < wanted; ++k) {
    last = first_after(p, shared, row, last);
    if (thread == 0) put(k, last);
  }
}

bool aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (t.shape[0] <= 1 || t.strides[0] % 4 == 0);
}

}  // namespace

void adjust_logits(const Tensor& out, const Tensor& logits, const Tensor& slot_idx,
                   const Tensor& penalties, const Tensor& output_counts, const Tensor& prompt_mask,
                   const Tensor& bias_ids, const Tensor& bias_values, const Tensor& allowed_mask,
                   Stream stream) {
  if (out.numel() == 0) return;
  AdjustParams params{};
  params.out = out.ptr<float>();
  params.logits = logits.ptr<float>();
  params.slots = slot_idx.ptr<int32_t>();
  params.penalties = penalties.ptr<float>();
  params.counts = output_counts.ptr<int32_t>();
  params.prompt_mask = prompt_mask.ptr<int32_t>();
  params.allowed_mask = allowed_mask.ptr<int32_t>();
  params.bias_ids = bias_ids.ptr<int32_t>();
  params.bias_values = bias_values.ptr<float>();
  params.out_stride = out.strides[0];
  params.logits_stride = logits.strides[0];
  params.counts_stride = output_counts.strides[0];
  params.prompt_stride = prompt_mask.strides[0];
  params.allowed_stride = allowed_mask.strides[0];
  params.bias_ids_stride = bias_ids.strides[0];
  params.bias_values_stride = bias_values.strides[0];
  params.num_slots = static_cast<int>(penalties.shape[0]);
  params.num_bias = static_cast<int>(bias_ids.shape[1]);
  params.vocab_size = static_cast<int>(out.shape[1]);
  params.vectors = aligned(out) && aligned(logits) && aligned(output_counts);
  const auto blocks = static_cast<unsigned>((out.shape[1] + kAdjustTokens - 1) / kAdjustTokens);
  launch_early("adjust_logits", adjust_logits_kernel,
               dim3(blocks, static_cast<unsigned>(out.shape[0])), kAdjustThreads, 0, stream,
               params);
}

void count_tokens(const Tensor& output_counts, const Tensor& token_ids, const Tensor& slot_idx,
                  Stream stream) {
  const int64_t num_rows = token_ids.shape[0];
  if (num_rows == 0) return;
  count_tokens_kernel<<<(num_rows + kCountThreads - 1) / kCountThreads, kCountThreads, 0, stream>>>(
      output_counts.ptr<int32_t>(), token_ids.ptr<int32_t>(), slot_idx.ptr<int32_t>(),
      output_counts.strides[0], output_counts.shape[0], output_counts.shape[1], num_rows);
  check_launch("count_tokens");
}

void top_logprobs(const Tensor& values, const Tensor& ids, const Tensor& drawn,
                  const Tensor& logits, const Tensor& token_ids, const Tensor& num_logprobs,
                  Stream stream) {
  if (logits.numel() == 0) return;
  TopParams params{};
  params.values = values.ptr<float>();
  params.ids = ids.ptr<int32_t>();
  params.drawn = drawn.ptr<float>();
  params.logits = logits.ptr<float>();
  params.token_ids = token_ids.ptr<int32_t>();
  params.num_logprobs = num_logprobs.ptr<int32_t>();
  params.values_stride = values.strides[0];
  params.ids_stride = ids.strides[0];
  params.logits_stride = logits.strides[0];
  params.num_columns = static_cast<int>(values.shape[1]);
  params.vocab_size = static_cast<int>(logits.shape[1]);
  params.vectors = aligned(logits);
  launch_early("top_logprobs", top_logprobs_kernel, dim3(static_cast<unsigned>(logits.shape[0])),
               kTopThreads, 0, stream, params);
}

}  // namespace tinyvllm::cuda
