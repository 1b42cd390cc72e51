// Draws one token id from each row of logits.
//
// What is drawn. With T the temperature and M the largest logit, token i has the weight
// w[i] = exp((logits[i] - M) / T). The tokens in order of logit, highest first and lower id first
// among equals, are cut to a prefix: the first top_k of them; of those, the fewest whose weight
// reaches top_p of the weight of all that top_k left; of those, the ones with w[i] >= min_p (the
// largest weight is 1). Then one uniform number u in [0, 1) picks from what is kept, in order of
// id: the first token at which the running sum of weights exceeds u times their total.
//
//   u = (x0 * 2^21 + floor(x1 / 2^11)) / 2^53,   (x0, x1, ..) = Philox4x32-10(key, counter)
//   key = (seed mod 2^32, floor(seed / 2^32)),  counter = (step_idx, 0, 0, 0)
//
// Weights are fp32, sums are fp64 in a fixed order, so an implementation with another exp may
// differ only where u lands within about 1e-7 of a border. A temperature below 1e-5 is argmax, as
// in vLLM; so is a row with no finite maximum. A NaN logit is never drawn.
//
// Work. One row a thread; nothing is sorted. The filters only look for the cut, the last token that
// is kept; then one pass draws. Each pass takes 16 logits a step:
//
//   greedy   maximum; first id that equals it
//   draw     weights summed in chunks of 512; the one chunk in question again, term by term
//   top_k    maxima of at least 4 * top_k groups: the top_k-th of them bounds the top_k-th logit
//   from
//            below; the few logits above the bound; nth_element among those
//   top_p    after top_k: a quickselect by weight among the top_k. Alone: bisection for a narrow
//   band
//            of weights that the cut lies in (a pass for each step), then the same among the band
#ifdef TINYVLLM_ISA
#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

// The weights of logits [i, i + 16), 0 for those that are not kept.
TINYVLLM_INLINE F16 weigh(const Weighing& w, F16 logits, int64_t i) {
  F16 weights = exp2_nonpositive(mul(sub(logits, set16(w.largest)), set16(w.scale_log2)));
  weights = keep_greater_equal(weights, weights, set16(w.min_weight));
  weights = keep_greater_equal(weights, logits, set16(w.cut_logit));
  // Among equals of the cut, ids up to its own; only blocks that reach beyond it need a look.
  if (i + kLineRows - 1 <= w.cut_id) return weights;
  const F16 up_to_cut = keep_lanes(weights, 0, w.cut_id + 1 - i, 0.0f);
  return choose_greater(weights, up_to_cut, logits, set16(w.cut_logit));
}

void weigh_logits(float* weights, const float* x, int64_t begin, int64_t end, const Weighing& w) {
  for (int64_t i = begin; i < end; i += kLineRows) {
    const F16 weight = weigh(w, load_logits(x, i, end), i);
    if (i + kLineRows <= end) {
      store16(weights + i - begin, weight);
    } else {
      float tail[kLineRows];
      store16(tail, weight);
      for (int64_t j = i; j < end; ++j) weights[j - begin] = tail[j - i];
    }
  }
}

// sums[c] is the weight of logits [c, c + 1) * kChunk.
void sum_chunks(double* sums, const float* x, int64_t n, const Weighing& w) {
  for (int64_t i = 0; i < n; ++sums) {
    D16 sum = zero16d();
    for (const int64_t end = i + kChunk; i < end && i < n; i += kLineRows) {
      sum = add(sum, weigh(w, load_logits(x, i, n), i));
    }
    *sums = reduce_add(sum);
  }
}

// The sum and number of the weights >= least.
Mass mass_from(const float* weights, int64_t n, float least) {
  const F16 bound = set16(least);
  D16 sums[2] = {zero16d(), zero16d()};
  int64_t count = 0, i = 0;
  const auto take = [&](F16 weight, D16& sum) __attribute__((always_inline)) {
    sum = add(sum, keep_greater_equal(weight, weight, bound));
    count += __builtin_popcount(greater_equal_bits(weight, bound));
  };
  for (; i + 2 * kLineRows <= n; i += 2 * kLineRows) {
    take(load16(weights + i), sums[0]);
    take(load16(weights + i + kLineRows), sums[1]);
  }
  for (; i < n; i += kLineRows) take(load_logits(weights, i, n), sums[0]);
  return {reduce_add(sums[0]) + reduce_add(sums[1]), count};
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../ops.h"
#include "isa.h"
#include "row_scan.h"
#include "scratch.h"
#include "simd.h"
#include "simd_tail.h"
#include "thread_pool.h"

namespace tinyvllm::cpu {
namespace {

constexpr int64_t kChunk = 512;
constexpr float kGreedyBelow = 1e-5f;

// What turns a logit into a weight: exp2((logit - largest) * scale_log2); 0 below min_weight and
// after the cut, the last token kept in the order by logit and id.
struct Weighing {
  float largest, scale_log2, min_weight;
  float cut_logit;
  int64_t cut_id;
};

struct Mass {
  double sum;
  int64_t count;
};

}  // namespace
}  // namespace tinyvllm::cpu

#define TINYVLLM_ISA_FILE "sample.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {
namespace {

// ---- The uniform number -------------------------------------------------------------------------

struct Words4 {
  uint32_t x[4];
};

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Words4 philox4x32_10(uint32_t key0, uint32_t key1, Words4 c) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c.x[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * c.x[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.x[1] ^ key0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.x[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return c;
}

double uniform(int64_t seed, int32_t step_idx) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  const Words4 r = philox4x32_10(static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
                                 {{static_cast<uint32_t>(step_idx), 0, 0, 0}});
  return static_cast<double>(uint64_t{r.x[0]} << 21 | r.x[1] >> 11) * 0x1p-53;
}

// ---- Candidates ---------------------------------------------------------------------------------

struct Candidate {
  float logit;
  float weight;
  int32_t id;
};

bool comes_first(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The last of the fewest first candidates whose weight reaches `mass`; [first, past) is reordered.
Candidate last_within_mass(Candidate* first, Candidate* past, double mass) {
  constexpr int64_t kSortBelow = 64;
  while (past - first > kSortBelow) {
    Candidate* middle = first + (past - first) / 2;
    const Candidate a = *first, b = *middle, c = *(past - 1);
    const Candidate pivot = comes_first(a, b)
                                ? (comes_first(b, c) ? b : (comes_first(a, c) ? c : a))
                                : (comes_first(a, c) ? a : (comes_first(b, c) ? c : b));
    double before = 0;
    Candidate* split = first;
    for (Candidate* at = first; at != past; ++at) {
      if (comes_first(*at, pivot)) {
        before += at->weight;
        std::swap(*at, *split++);
      }
    }
    if (before >= mass) {
      past = split;
      continue;
    }
    if (before + pivot.weight >= mass) return pivot;
    mass -= before;
    first = split;
  }
  std::sort(first, past, comes_first);
  double sum = 0;
  for (const Candidate* at = first; at != past; ++at) {
    sum += at->weight;
    if (sum >= mass) return *at;
  }
  return *(past - 1);
}

// ---- One row ------------------------------------------------------------------------------------

struct RowParams {
  float temperature, top_p, min_p;
  int64_t top_k;
  double u;
};

class RowSampler {
 public:
  RowSampler(const float* logits, int64_t n, const RowParams& params, Scratch& scratch)
      : logits_(logits), n_(n), p_(params) {
    char* memory = static_cast<char*>(scratch.get((n / kChunk + 1) * sizeof(double) +
                                                  n * (sizeof(Candidate) + sizeof(int32_t)) +
                                                  (n + 2 * kLineRows) * sizeof(float)));
    sums_ = reinterpret_cast<double*>(memory);
    candidates_ = reinterpret_cast<Candidate*>(sums_ + n / kChunk + 1);
    ids_ = reinterpret_cast<int32_t*>(candidates_ + n);
    values_ = reinterpret_cast<float*>(ids_ + n);
  }

  int32_t draw() {
    const float largest = largest_logit(logits_, n_);
    // NaN fails every comparison, so a NaN temperature or top_p is greedy.
    if (!(p_.temperature >= kGreedyBelow) || !std::isfinite(largest) || !(p_.top_p > 0) ||
        p_.top_k == 1) {
      return first_id(largest);
    }
    weighing_ = {.largest = largest,
                 .scale_log2 = 1.44269504f / p_.temperature,
                 .min_weight = 0,
                 .cut_logit = -std::numeric_limits<float>::infinity(),
                 .cut_id = n_};
    if (p_.top_k > 0 && p_.top_k < n_) {
      cut_to_top_k();
    } else if (p_.top_p < 1) {
      cut_to_top_p();
    }
    weighing_.min_weight = std::max(p_.min_p, 0.0f);
    return draw_from_kept();
  }

 private:
  int32_t first_id(float largest) const {
    int32_t id = 0;
    ids_from(&id, logits_, n_, largest, 1);
    return id;
  }

  int32_t draw_from_kept() {
    TINYVLLM_DISPATCH(sum_chunks)(sums_, logits_, n_, weighing_);
    const int64_t last = (n_ - 1) / kChunk;
    double total = 0;
    for (int64_t chunk = 0; chunk <= last; ++chunk) total += sums_[chunk];
    const double target = p_.u * total;
    double before = 0;
    int64_t chunk = 0;
    while (chunk < last && before + sums_[chunk] <= target) before += sums_[chunk++];
    const int64_t begin = chunk * kChunk, end = std::min(begin + kChunk, n_);
    float weights[kChunk];
    TINYVLLM_DISPATCH(weigh_logits)(weights, logits_, begin, end, weighing_);
    int64_t drawn = -1;
    for (int64_t id = begin; id < end; ++id) {
      if (weights[id - begin] > 0) drawn = id;
      before += weights[id - begin];
      if (before > target) break;
    }
    // The sum of a chunk and that of its terms may differ in the last bit: then its last term it
    // is.
    return drawn >= 0 ? static_cast<int32_t>(drawn) : first_id(weighing_.largest);
  }

  void cut_at(const Candidate& last) {
    weighing_.cut_logit = last.logit;
    weighing_.cut_id = last.id;
  }

  void cut_to_top_k() {
    const float bound = lower_bound_of_kth(logits_, n_, p_.top_k, values_);
    const int64_t count = ids_from(ids_, logits_, n_, bound, n_);
    const int64_t k = std::min(p_.top_k, count);
    for (int64_t i = 0; i < count; ++i) candidates_[i] = {logits_[ids_[i]], 0, ids_[i]};
    std::nth_element(candidates_, candidates_ + (k - 1), candidates_ + count, comes_first);
    Candidate last = candidates_[k - 1];
    if (p_.top_p < 1) {
      for (int64_t i = 0; i < k; ++i) values_[i] = candidates_[i].logit;
      TINYVLLM_DISPATCH(weigh_logits)(values_, values_, 0, k, weighing_);
      double total = 0;
      for (int64_t i = 0; i < k; ++i) total += candidates_[i].weight = values_[i];
      last = last_within_mass(candidates_, candidates_ + k, p_.top_p * total);
    }
    cut_at(last);
  }

  // `low` is a weight that the kept ones reach, `high` one that they do not all reach: the tokens
  // from `high` on weigh less than is wanted, those from `low` on at least as much.
  void cut_to_top_p() {
    constexpr int64_t kFew = 256;
    const auto mass_from = TINYVLLM_DISPATCH(mass_from);
    TINYVLLM_DISPATCH(weigh_logits)(values_, logits_, 0, n_, weighing_);
    const double total = mass_from(values_, n_, 0).sum, wanted = p_.top_p * total;
    // All tokens below this weigh less than 1 - top_p together.
    float low =
        static_cast<float>(std::min(0.99 * (total - wanted) / static_cast<double>(n_), 1.0));
    float high = 2;
    Mass from_low = mass_from(values_, n_, low), from_high = {0, 0};
    while (from_low.count - from_high.count > kFew) {
      const float middle = std::sqrt(low) * std::sqrt(high);
      if (!(middle > low && middle < high)) break;
      const Mass mass = mass_from(values_, n_, middle);
      if (mass.sum >= wanted) {
        low = middle;
        from_low = mass;
      } else {
        high = middle;
        from_high = mass;
      }
    }
    const int64_t count = ids_from(ids_, values_, n_, low, n_);
    int64_t in_band = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = ids_[i];
      if (values_[id] < high) candidates_[in_band++] = {logits_[id], values_[id], id};
    }
    cut_at(last_within_mass(candidates_, candidates_ + in_band, wanted - from_high.sum));
  }

  const float* logits_;
  int64_t n_;
  RowParams p_;
  Weighing weighing_{};
  double* sums_;           // [n / kChunk + 1]
  Candidate* candidates_;  // [n]
  int32_t* ids_;           // [n]
  float* values_;          // [n + 2 * kLineRows]
};

thread_local Scratch t_scratch;

}  // namespace

void sample(const Tensor& token_ids, const Tensor& logits, const Tensor& temperature,
            const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
            const Tensor& step_idx) {
  const int64_t vocab_size = logits.shape[1], row_stride = logits.strides[0];
  if (vocab_size == 0) return;
  parallel_for(logits.shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const RowParams params{
          .temperature = temperature.ptr<float>()[r],
          .top_p = top_p.ptr<float>()[r],
          .min_p = min_p.ptr<float>()[r],
          .top_k = top_k.ptr<int32_t>()[r],
          .u = uniform(seeds.ptr<int64_t>()[r], step_idx.ptr<int32_t>()[r]),
      };
      RowSampler sampler(logits.ptr<float>() + r * row_stride, vocab_size, params, t_scratch);
      token_ids.ptr<int32_t>()[r] = sampler.draw();
    }
  });
}

}  // namespace tinyvllm::cpu

#endif
