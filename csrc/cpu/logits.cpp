// What a request asks of its logits before the draw, and what it is told about them after it.
//
//   adjust_logits   out = logits with the slot's bias, penalties and mask; the logits stay raw
//   count_tokens    counts the drawn token in the slot's output
//   top_logprobs    log-softmax of the drawn token and of the most likely ones
//
// A slot holds its state in the shapes that a row is read in: a count for each token, and bits, bit
// i % 32 of word i / 32 for token i.
//
// Work. One row a thread. adjust_logits walks over words of 32 tokens and reads counts only of a
// slot that has penalties, few words of which have a token to penalize; the biased tokens, few, are
// done again. top_logprobs sorts nothing but a few candidates: a pass for the maximum, one for the
// sum, one for a bound that k logits reach, one for those above it.
#ifdef TINYVLLM_ISA
#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

// Token j of a word, `x` its logit. Both branches are computed, so that loops over j are vectors.
TINYVLLM_INLINE float adjust_one(float x, int j, const SlotWord& word, const Penalties& p) {
  const int32_t count = word.counts[j];
  const bool in_output = count > 0, seen = in_output | ((word.prompt >> j & 1) != 0);
  const float divided = x / p.repetition, multiplied = x * p.repetition;
  const float repeated = x > 0 ? divided : multiplied;
  x = seen ? repeated : x;
  const float reduced = (x - p.frequency * static_cast<float>(count)) - p.presence;
  x = in_output ? reduced : x;
  return (word.allowed >> j & 1) != 0 ? x : -std::numeric_limits<float>::infinity();
}

void adjust_word(float* out, const float* x, const SlotWord& word, const Penalties& p, int tokens) {
  if (tokens == kWordTokens) {
    for (int j = 0; j < kWordTokens; ++j) out[j] = adjust_one(x[j], j, word, p);
  } else {
    for (int j = 0; j < tokens; ++j) out[j] = adjust_one(x[j], j, word, p);
  }
}

// Does the output have any of the word's tokens?
bool is_counted(const int32_t* counts, int tokens) {
  int32_t any = 0;
  if (tokens == kWordTokens) {
    for (int j = 0; j < kWordTokens; ++j) any |= counts[j];
  } else {
    for (int j = 0; j < tokens; ++j) any |= counts[j];
  }
  return any != 0;
}

// out[j] = x[j] where bit j is set, else -inf.
void mask_word(float* out, const float* x, uint32_t allowed, int tokens) {
  for (int j = 0; j < tokens; ++j) {
    out[j] = (allowed >> j & 1) != 0 ? x[j] : -std::numeric_limits<float>::infinity();
  }
}

// The sum of exp(x - largest), NaN left out.
double sum_exp(const float* x, int64_t n, float largest) {
  D16 sum = zero16d();
  for (int64_t i = 0; i < n; i += kLineRows) {
    const F16 distance = sub(load_logits(x, i, n), set16(largest));
    const F16 weight = exp2_nonpositive(mul(distance, set16(1.44269504f)));
    sum = add(sum, keep_greater_equal(weight, weight, zero16()));
  }
  return reduce_add(sum);
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../ops.h"
#include "check_indices.h"
#include "isa.h"
#include "row_scan.h"
#include "scratch.h"
#include "simd.h"
#include "simd_tail.h"
#include "thread_pool.h"

namespace tinyvllm::cpu {
namespace {

constexpr int kWordTokens = 32;

struct Penalties {
  float repetition, frequency, presence;

  bool any() const { return repetition != 1 || frequency != 0 || presence != 0; }
};

// What a slot knows of 32 tokens.
struct SlotWord {
  const int32_t* counts;
  uint32_t prompt, allowed;
};

}  // namespace
}  // namespace tinyvllm::cpu

#define TINYVLLM_ISA_FILE "logits.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {
namespace {

thread_local Scratch t_scratch;

struct Slot {
  Penalties penalties;
  const int32_t* counts;       // [V]
  const int32_t* prompt_mask;  // [ceil(V / 32)]
  const int32_t* allowed_mask;
  const int32_t* bias_ids;  // [num_bias]
  const float* bias_values;
  int64_t num_bias;

  SlotWord word(int64_t w) const {
    return {counts + w * kWordTokens, static_cast<uint32_t>(prompt_mask[w]),
            static_cast<uint32_t>(allowed_mask[w])};
  }
};

void adjust_row(float* out, const float* x, int64_t n, const Slot& slot) {
  const bool penalized = slot.penalties.any();
  const auto adjust_word = TINYVLLM_DISPATCH(adjust_word);
  const auto mask_word = TINYVLLM_DISPATCH(mask_word);
  const auto is_counted = TINYVLLM_DISPATCH(is_counted);
  for (int64_t i = 0; i < n; i += kWordTokens) {
    const int tokens = static_cast<int>(std::min<int64_t>(kWordTokens, n - i));
    const SlotWord word = slot.word(i / kWordTokens);
    if (penalized && (word.prompt != 0 || is_counted(word.counts, tokens))) {
      adjust_word(out + i, x + i, word, slot.penalties, tokens);
    } else if (word.allowed == ~0u) {
      std::memcpy(out + i, x + i, tokens * sizeof(float));
    } else {
      mask_word(out + i, x + i, word.allowed, tokens);
    }
  }
  for (int64_t b = 0; b < slot.num_bias; ++b) {
    const int64_t id = slot.bias_ids[b];
    if (id < 0 || id >= n) continue;
    const int64_t w = id / kWordTokens;
    const int j = static_cast<int>(id % kWordTokens);
    const float biased = x[id] + slot.bias_values[b];
    SlotWord word = slot.word(w);
    if (penalized) {
      // The one token as a word of its own.
      word = {word.counts + j, word.prompt >> j, word.allowed >> j};
      adjust_word(out + id, &biased, word, slot.penalties, 1);
    } else {
      mask_word(out + id, &biased, word.allowed >> j, 1);
    }
  }
}

struct TopRow {
  float* values;  // [num_columns]
  int32_t* ids;
  int64_t num_columns, num_wanted;
};

float top_row(const TopRow& top, const float* x, int64_t n, int32_t token_id) {
  const float largest = largest_logit(x, n);
  // Without a finite maximum there is no distribution.
  const float log_sum =
      std::isfinite(largest)
          ? static_cast<float>(std::log(TINYVLLM_DISPATCH(sum_exp)(x, n, largest)))
          : std::numeric_limits<float>::quiet_NaN();
  const auto logprob = [&](int32_t id) { return (x[id] - largest) - log_sum; };
  const int64_t wanted = std::min({top.num_wanted, top.num_columns, n});
  int64_t listed = 0;
  if (wanted > 0) {
    char* memory = static_cast<char*>(
        t_scratch.get(n * sizeof(int32_t) + (n + 2 * kLineRows) * sizeof(float)));
    auto* ids = reinterpret_cast<int32_t*>(memory);
    const float bound =
        lower_bound_of_kth(x, n, wanted, reinterpret_cast<float*>(memory + n * sizeof(int32_t)));
    const int64_t count = ids_from(ids, x, n, bound, n);
    listed = std::min(wanted, count);
    std::partial_sort(ids, ids + listed, ids + count,
                      [&](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    for (int64_t k = 0; k < listed; ++k) {
      top.values[k] = logprob(ids[k]);
      top.ids[k] = ids[k];
    }
  }
  for (int64_t k = listed; k < top.num_columns; ++k) {
    top.values[k] = -std::numeric_limits<float>::infinity();
    top.ids[k] = -1;
  }
  return logprob(token_id);
}

}  // namespace

void adjust_logits(const Tensor& out, const Tensor& logits, const Tensor& slot_idx,
                   const Tensor& penalties, const Tensor& output_counts, const Tensor& prompt_mask,
                   const Tensor& bias_ids, const Tensor& bias_values, const Tensor& allowed_mask) {
  const int64_t n = logits.shape[1];
  check_indices("adjust_logits", "slot_idx", slot_idx, -1, penalties.shape[0]);
  parallel_for(logits.shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t s = slot_idx.ptr<int32_t>()[r];
      float* row = out.ptr<float>() + r * out.strides[0];
      const float* x = logits.ptr<float>() + r * logits.strides[0];
      if (s < 0) {
        std::memcpy(row, x, n * sizeof(float));
        continue;
      }
      const float* p = penalties.ptr<float>() + s * 3;
      adjust_row(row, x, n,
                 {.penalties = {p[0], p[1], p[2]},
                  .counts = output_counts.ptr<int32_t>() + s * output_counts.strides[0],
                  .prompt_mask = prompt_mask.ptr<int32_t>() + s * prompt_mask.strides[0],
                  .allowed_mask = allowed_mask.ptr<int32_t>() + s * allowed_mask.strides[0],
                  .bias_ids = bias_ids.ptr<int32_t>() + s * bias_ids.strides[0],
                  .bias_values = bias_values.ptr<float>() + s * bias_values.strides[0],
                  .num_bias = bias_ids.shape[1]});
    }
  });
}

void count_tokens(const Tensor& output_counts, const Tensor& token_ids, const Tensor& slot_idx) {
  check_indices("count_tokens", "slot_idx", slot_idx, -1, output_counts.shape[0]);
  check_indices("count_tokens", "token_ids", token_ids, 0, output_counts.shape[1]);
  for (int64_t r = 0; r < token_ids.shape[0]; ++r) {
    const int64_t s = slot_idx.ptr<int32_t>()[r];
    if (s < 0) continue;
    ++output_counts.ptr<int32_t>()[s * output_counts.strides[0] + token_ids.ptr<int32_t>()[r]];
  }
}

void top_logprobs(const Tensor& values, const Tensor& ids, const Tensor& drawn,
                  const Tensor& logits, const Tensor& token_ids, const Tensor& num_logprobs) {
  const int64_t n = logits.shape[1];
  check_indices("top_logprobs", "token_ids", token_ids, 0, n);
  parallel_for(logits.shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t wanted = num_logprobs.ptr<int32_t>()[r];
      if (wanted < 0) continue;
      drawn.ptr<float>()[r] =
          top_row({.values = values.ptr<float>() + r * values.strides[0],
                   .ids = ids.ptr<int32_t>() + r * ids.strides[0],
                   .num_columns = values.shape[1],
                   .num_wanted = wanted},
                  logits.ptr<float>() + r * logits.strides[0], n, token_ids.ptr<int32_t>()[r]);
    }
  });
}

}  // namespace tinyvllm::cpu

#endif
