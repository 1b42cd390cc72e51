// Draws one token id from each row of logits; ../cpu/sample.cpp states what is drawn, exactly.
//
// Nothing is sorted but a few candidates, and the logits are read from memory once. A row is cut
// into chunks of 2048 logits, one a warp, all in flight at once; lane l has logits 4l .. 4l+3 of
// each 128:
//
//   chunk   [lane 0 | lane 1 | .. | lane 31][lane 0 | lane 1 | ..   16 times, 64 logits a lane
//
//   survey_kernel   Warps go over the chunks of all rows. Of a chunk they store the maximum of each
//     lane's 64 logits and that of the chunk, m; without top_k also the sum of 2^((x - m) * scale).
//
//   draw_kernel     A block for each row.
//     greedy       the lowest id that equals the maximum, in the first chunk that has it
//     no filter    a chunk by the running sum of their sums, then a token within the chunk
//     filters      a bound that no kept token is below, from a histogram of the lane maxima:
//                    top_k   so many lane maxima reach it, so as many tokens do
//                    top_p   the lane maxima that reach it weigh enough alone; if they never do, a
//                            token lighter than (1 - top_p) / V of the total cannot be needed
//                    min_p   its own logit
//                  then the candidates: lanes whose maximum reaches the bound are read again. They
//                  are put in order, cut, put in order of id, and summed up: up to 256 by comparing
//                  all with all, up to 2048 by sorting.
//     crowds       More candidates than that (flat logits, huge top_k): histograms over the row,
//                  each 1024 times finer, until the bin with the border fits the list.
//
// Order. Logit and id make one 64-bit number, larger for what comes first, so there are no ties.
// Weights are fp32; their sums are integers in units of 2^-42 of the largest weight: exact, so no
// result depends on the order in which threads arrive. Chunk sums are fp32 of 2048 terms. The token
// is that of the reference unless u or a border lands within about 1e-7 of a step.
//
// Memory. survey: 128 threads of 96 registers, five blocks per SM, which always have 80 to 160 KiB
// of logits on their way. draw: 256 threads of 90 registers, 37 KiB of shared memory. Workspace:
// 136 bytes for each chunk of each row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "tensor_cores.cuh"
#include "workspace.h"

namespace tinyvllm::cuda {
namespace {

using Mass = unsigned long long;   // a sum of weights, in units of 2^-42
using Order = unsigned long long;  // a token: the logit's order, then the id's; larger comes first

constexpr int kSurveyThreads = 128;
constexpr int kSurveyBlocksPerSm = 5;
constexpr int kThreads = 256;  // of a block that draws
constexpr int kWarps = kThreads / 32;
constexpr int kChunk = 2048;
constexpr int kLaneLogits = kChunk / 32;
constexpr int kSteps = kLaneLogits / 4;
constexpr int kBins = 1024;
constexpr int kMaxListed = 2048;
constexpr int kFewListed =
    kThreads;                 // one a thread: placed by comparing all with all, not by sorting
constexpr int kOwnLanes = 8;  // lane maxima that a thread of the draw keeps in registers
constexpr int kMaxVocabSize =
    kBins * kChunk;  // so that the chunks' masses fit the bins, and 64 bits
constexpr float kMassUnit = 0x1p42f;
constexpr float kNone = -INFINITY;
constexpr float kGreedyBelow = 1e-5f;
constexpr unsigned kAllLanes = ~0u;

struct SampleParams {
  int32_t* token_ids;        // [R]
  const float* logits;       // [R, vocab_size], row stride row_stride
  const float* temperature;  // [R], as all that follow
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int32_t* step_idx;
  float* lane_maxima;     // [R, num_chunks, 32]
  float2* chunk_max_sum;  // [R, num_chunks]
  int64_t row_stride;
  int num_rows, vocab_size, num_chunks;
  bool vectors;  // every row begins at a multiple of 16 bytes
};

// The parameters of a row that decide what has to be summed up.
struct RowParams {
  float temperature, top_p, min_p;
  int top_k;  // 0: all

  __device__ RowParams(const SampleParams& p, int row)
      : temperature(p.temperature[row]),
        top_p(p.top_p[row]),
        min_p(p.min_p[row]),
        top_k(p.top_k[row]) {
    if (top_k < 0 || top_k >= p.vocab_size) top_k = 0;
  }

  // NaN fails every comparison, so a NaN temperature or top_p is greedy.
  __device__ bool is_greedy() const {
    return !(temperature >= kGreedyBelow) || !(top_p > 0.0f) || top_k == 1;
  }
  __device__ bool needs_sums() const { return top_k == 0 && !is_greedy(); }
  __device__ float scale_log2() const { return 1.44269504f / temperature; }
};

// ---- Numbers ------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al., SC 2011) of key `seed` and counter (step_idx, 0, 0, 0), as a number
// in [0, 1) with 53 random bits.
__device__ double uniform(int64_t seed, int32_t step_idx) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t x[4] = {static_cast<uint32_t>(step_idx), 0, 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t low0 = 0xD2511F53u * x[0], high0 = __umulhi(0xD2511F53u, x[0]);
    const uint32_t low2 = 0xCD9E8D57u * x[2], high2 = __umulhi(0xCD9E8D57u, x[2]);
    x[0] = high2 ^ x[1] ^ key0;
    x[1] = low2;
    x[2] = high0 ^ x[3] ^ key1;
    x[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return static_cast<double>(static_cast<unsigned long long>(x[0]) << 21 | x[1] >> 11) * 0x1p-53;
}

// An integer that is ordered as the float is. Both zeros are one.
__device__ __forceinline__ uint32_t rank_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ Order order_of(float x, int id) {
  return static_cast<Order>(rank_of(x)) << 32 | (~0u - static_cast<uint32_t>(id));
}

__device__ __forceinline__ float logit_of(Order order) {
  const uint32_t rank = static_cast<uint32_t>(order >> 32);
  return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

// Logits i .. i+3, i a multiple of 4; -inf for NaN and past the end.
__device__ __forceinline__ float4 load_logits(const SampleParams& p, const float* row, int i) {
  float4 x;
  if (p.vectors && i + 4 <= p.vocab_size) {
    x = *reinterpret_cast<const float4*>(row + i);
  } else {
    x.x = i < p.vocab_size ? row[i] : kNone;
    x.y = i + 1 < p.vocab_size ? row[i + 1] : kNone;
    x.z = i + 2 < p.vocab_size ? row[i + 2] : kNone;
    x.w = i + 3 < p.vocab_size ? row[i + 3] : kNone;
  }
  // fmaxf drops a NaN.
  return {fmaxf(x.x, kNone), fmaxf(x.y, kNone), fmaxf(x.z, kNone), fmaxf(x.w, kNone)};
}

// Bits that `range` must lose to be less than kBins.
__device__ __forceinline__ int shift_for(unsigned long long range) {
  return max(0, 64 - __clzll(static_cast<long long>(range)) - 10);
}
static_assert(kBins == 1 << 10);

// ---- The block together -------------------------------------------------------------------------

struct Shared {
  Order list[kMaxListed];
  Mass bin_mass[kBins];
  uint32_t bin_count[kBins];
  int lanes[kMaxListed];  // chunk * 32 + lane: whose maximum reaches the bound
  unsigned long long warp_values[kWarps], warp_values2[kWarps];
  int num_listed, num_lanes;
  int found;  // a bin or an id
  Mass found_mass;
  uint32_t found_count;
};

template <typename T, typename Combine>
__device__ T reduce_block(Shared& shared, T x, Combine combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, step));
  T* values = reinterpret_cast<T*>(shared.warp_values);
  __syncthreads();
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = x;
  __syncthreads();
  x = values[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x = combine(x, values[w]);
  return x;
}

__device__ Mass sum_block(Shared& shared, Mass x) {
  return reduce_block(shared, x, [](Mass a, Mass b) { return a + b; });
}

__device__ float max_block(Shared& shared, float x) {
  return reduce_block(shared, x, [](float a, float b) { return fmaxf(a, b); });
}

__device__ int min_block(Shared& shared, int x) {
  return reduce_block(shared, x, [](int a, int b) { return min(a, b); });
}

// The sum over the threads before this one.
__device__ Mass sum_before(unsigned long long* warp_values, Mass x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Mass inclusive = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Mass below = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  __syncthreads();
  if (lane == 31) warp_values[warp] = inclusive;
  __syncthreads();
  Mass before = inclusive - x;
  for (int w = 0; w < warp; ++w) before += warp_values[w];
  return before;
}

// Sorts the list, the first first. Its length is rounded up to a power of two with zeros. A short
// list is the business of one warp.
__device__ void sort_list(Shared& shared, int n) {
  int padded = 2;
  while (padded < n) padded *= 2;
  for (int i = n + threadIdx.x; i < padded; i += kThreads) shared.list[i] = 0;
  __syncthreads();
  const bool one_warp = padded <= 64;
  if (!one_warp || threadIdx.x < 32) {
    for (int run = 2; run <= padded; run *= 2) {
      for (int step = run / 2; step > 0; step /= 2) {
        for (int pair = threadIdx.x; pair < padded / 2; pair += kThreads) {
          const int i = (pair & ~(step - 1)) * 2 + (pair & (step - 1)), j = i + step;
          const Order a = shared.list[i], b = shared.list[j];
          if ((a < b) == ((i & run) == 0)) {
            shared.list[i] = b;
            shared.list[j] = a;
          }
        }
        if (one_warp) {
          __syncwarp();
        } else {
          __syncthreads();
        }
      }
    }
  }
  __syncthreads();
}

// ---- One row, drawn by a block
// --------------------------------------------------------------------

class RowSampler {
 public:
  __device__ RowSampler(const SampleParams& params, Shared& shared, int row)
      : p_(params),
        shared_(shared),
        logits_(params.logits + row * params.row_stride),
        lane_maxima_(params.lane_maxima + static_cast<int64_t>(row) * params.num_chunks * 32),
        chunk_max_sum_(params.chunk_max_sum + static_cast<int64_t>(row) * params.num_chunks),
        row_(params, row),
        scale_log2_(row_.scale_log2()),
        u_(uniform(params.seeds[row], params.step_idx[row])) {}

  __device__ int draw() {
#pragma unroll
    for (int j = 0; j < kOwnLanes; ++j) {
      const int i = threadIdx.x + j * kThreads;
      own_lanes_[j] = i < p_.num_chunks * 32 ? lane_maxima_[i] : kNone;
    }
    largest_ = kNone;
    for_each_lane([this](int, float x) { largest_ = fmaxf(largest_, x); });
    largest_ = max_block(shared_, largest_);
    if (row_.is_greedy() || !isfinite(largest_)) return first_largest();
    if (row_.needs_sums()) {
      sum_chunks();
      if (!has_top_p() && !(row_.min_p > 0.0f)) return draw_from_row(0, true);
    }
    const uint32_t bound = lower_bound();
    list_candidates(bound);
    if (shared_.num_listed <= kFewListed) return draw_from_few();
    return shared_.num_listed <= kMaxListed ? draw_from_candidates() : draw_from_crowd(bound);
  }

 private:
  __device__ bool has_top_k() const { return row_.top_k > 0; }
  __device__ bool has_top_p() const { return row_.top_p < 1.0f; }
  __device__ float weight_of(float logit) const {
    return exp2_approx((logit - largest_) * scale_log2_);
  }
  __device__ Mass mass_of(float logit) const {
    return __float2ull_rn(weight_of(logit) * kMassUnit);
  }

  // Calls f(i, maximum) for every lane of every chunk, i = chunk * 32 + lane: this thread's share.
  template <typename F>
  __device__ __forceinline__ void for_each_lane(F f) const {
#pragma unroll
    for (int j = 0; j < kOwnLanes; ++j) f(threadIdx.x + j * kThreads, own_lanes_[j]);
    for (int i = threadIdx.x + kOwnLanes * kThreads; i < p_.num_chunks * 32; i += kThreads) {
      f(i, lane_maxima_[i]);
    }
  }

  // Lowest id that equals the largest logit.
  __device__ int first_largest() {
    if (largest_ == kNone) return 0;
    int chunk = p_.num_chunks;
    for (int c = threadIdx.x; c < p_.num_chunks; c += kThreads) {
      if (chunk_max_sum_[c].x == largest_) chunk = min(chunk, c);
    }
    chunk = min_block(shared_, chunk);
    int id = p_.vocab_size;
    for (int i = threadIdx.x * 4; i < kChunk; i += kThreads * 4) {
      const float4 x = load_logits(p_, logits_, chunk * kChunk + i);
      const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int c = 3; c >= 0; --c) {
        if (values[c] == largest_) id = min(id, chunk * kChunk + i + c);
      }
    }
    return min_block(shared_, id);
  }

  // bin_mass[c] = the mass of chunk c, as the warps summed it up; total_ = that of the row.
  __device__ void sum_chunks() {
    Mass sum = 0;
    for (int c = threadIdx.x; c < p_.num_chunks; c += kThreads) {
      const float2 max_sum = chunk_max_sum_[c];
      const Mass mass = __float2ull_rn(max_sum.y * weight_of(max_sum.x) * kMassUnit);
      shared_.bin_mass[c] = mass;
      sum += mass;
    }
    total_ = sum_block(shared_, sum);
  }

  // The bin in which the count (or the mass) of all bins from the highest down reaches `wanted`,
  // and in found_count and found_mass what lies above it. Bin 0 if it never does.
  __device__ int find_bin(bool by_mass, double wanted) {
    constexpr int kEach = kBins / kThreads;
    const int first = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
    Mass mass = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mass += shared_.bin_mass[first - i];
      count += shared_.bin_count[first - i];
    }
    mass = sum_before(shared_.warp_values, mass);
    count = sum_before(shared_.warp_values2, count);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int bin = first - i;
      const Mass next_mass = mass + shared_.bin_mass[bin];
      const Mass next_count = count + shared_.bin_count[bin];
      const bool before = static_cast<double>(by_mass ? mass : count) < wanted;
      const bool after = static_cast<double>(by_mass ? next_mass : next_count) < wanted;
      if (before && (!after || bin == 0)) {  // true once
        shared_.found = bin;
        shared_.found_mass = mass;
        shared_.found_count = static_cast<uint32_t>(count);
      }
      mass = next_mass;
      count = next_count;
    }
    __syncthreads();
    return shared_.found;
  }

  // Adds a token to a bin. A 64-bit atomic of shared memory would be a loop of compare-and-swap;
  // two of 32 bits are not, and the sum of their carries is the same in any order.
  __device__ __forceinline__ void count_in(int bin, Mass mass) {
    atomicAdd(&shared_.bin_count[bin], 1u);
    if (mass == 0) return;
    auto* halves = reinterpret_cast<uint32_t*>(&shared_.bin_mass[bin]);  // little-endian
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + (atomicAdd(halves, low) + low < low);
    if (high != 0) atomicAdd(halves + 1, high);
  }

  __device__ void clear_bins() {
    __syncthreads();
    for (int b = threadIdx.x; b < kBins; b += kThreads) {
      shared_.bin_mass[b] = 0;
      shared_.bin_count[b] = 0;
    }
    __syncthreads();
  }

  // A rank that no kept token is below.
  __device__ uint32_t lower_bound() {
    const uint32_t least = rank_of(-3.4028235e38f), most = rank_of(largest_);  // not -inf: weight 0
    const uint32_t light = has_top_k() && has_top_p() ? least : min_p_bound(least, most);
    if (!has_top_k() && !has_top_p()) return light;
    uint32_t low = most;
    for_each_lane([&](int, float x) {
      if (rank_of(x) >= least) low = min(low, rank_of(x));
    });
    low = reduce_block(shared_, low, [](uint32_t a, uint32_t b) { return min(a, b); });
    const int shift = shift_for(most - low);
    clear_bins();
    for_each_lane([&](int, float x) {
      const uint32_t rank = rank_of(x);
      if (rank >= low) count_in((rank - low) >> shift, has_top_k() ? 0 : mass_of(x));
    });
    __syncthreads();
    const double wanted =
        has_top_k() ? row_.top_k : static_cast<double>(row_.top_p) * static_cast<double>(total_);
    const int bin = find_bin(!has_top_k(), wanted);
    const bool reached =
        has_top_k()
            ? shared_.found_count + shared_.bin_count[bin] >= static_cast<uint32_t>(row_.top_k)
            : static_cast<double>(shared_.found_mass + shared_.bin_mass[bin]) >= wanted * 1.000001;
    if (reached) return max(light, low + (static_cast<uint32_t>(bin) << shift));
    if (has_top_k()) return light;
    const float lightest = static_cast<float>(total_) / kMassUnit * (1.0f - row_.top_p) * 0.9f /
                           static_cast<float>(p_.vocab_size);
    return max(light, bound_of(lightest, least, most));
  }

  __device__ uint32_t min_p_bound(uint32_t least, uint32_t most) const {
    return row_.min_p > 0.0f ? bound_of(row_.min_p * 0.9f, least, most) : least;
  }

  // The rank of a logit of about this weight; callers leave room for rounding.
  __device__ uint32_t bound_of(float weight, uint32_t least, uint32_t most) const {
    const float logit = largest_ + logf(weight) * row_.temperature;
    return min(max(rank_of(logit), least), most);
  }

  // Lists every token from the bound on, in no order. Past kMaxListed they are only counted.
  __device__ void list_candidates(uint32_t bound) {
    __syncthreads();
    if (threadIdx.x == 0) shared_.num_listed = shared_.num_lanes = 0;
    __syncthreads();
    for_each_lane([&](int i, float x) {
      if (rank_of(x) < bound) return;
      const int at = atomicAdd(&shared_.num_lanes, 1);
      if (at < kMaxListed) shared_.lanes[at] = i;
    });
    __syncthreads();
    if (shared_.num_lanes > kMaxListed) {
      if (threadIdx.x == 0) shared_.num_listed = shared_.num_lanes;
      __syncthreads();
      return;
    }
    const Order from = static_cast<Order>(bound) << 32;
    const int n = shared_.num_lanes * kSteps;
    for (int first = 0; first < n; first += 8 * kThreads) {
      for (int i = first + threadIdx.x; i < min(n, first + 8 * kThreads); i += kThreads) {
        const int lane = shared_.lanes[i / kSteps], step = i % kSteps;
        list_within(lane / 32 * kChunk + step * 128 + lane % 32 * 4, from, ~Order{0});
      }
      __syncthreads();
      if (shared_.num_listed > kMaxListed) break;  // a crowd
      __syncthreads();
    }
  }

  // Of logits i .. i+3 those in [low, high].
  __device__ __forceinline__ void list_within(int i, Order low, Order high) {
    const float4 x = load_logits(p_, logits_, i);
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Order order = order_of(values[c], i + c);
      if (order < low || order > high) continue;
      const int at = atomicAdd(&shared_.num_listed, 1);
      if (at < kMaxListed) shared_.list[at] = order;
    }
  }

  // How many listed tokens, in order, are needed for the mass to reach `wanted`, which is known to
  // hold `above` without them; sets `mass` to what they have together. At least one.
  __device__ int count_for_mass(int n, Mass above, double wanted, Mass& mass) {
    const int each = (n + kThreads - 1) / kThreads;
    const int begin = min(n, static_cast<int>(threadIdx.x) * each), end = min(n, begin + each);
    Mass own = 0;
    for (int i = begin; i < end; ++i) own += mass_of(logit_of(shared_.list[i]));
    Mass before = above + sum_before(shared_.warp_values, own);
    Mass count = 0, kept = 0;
    for (int i = begin; i < end; ++i) {
      const Mass m = mass_of(logit_of(shared_.list[i]));
      if (i == 0 || static_cast<double>(before) < wanted) {
        ++count;
        kept += m;
      }
      before += m;
    }
    mass = sum_block(shared_, kept);
    return static_cast<int>(sum_block(shared_, count));
  }

  // A candidate a thread: its place is what it finds by comparing itself with all others.
  __device__ int draw_from_few() {
    const int n = shared_.num_listed, i = threadIdx.x;
    const Order own = i < n ? shared_.list[i] : 0;
    const float weight = i < n ? weight_of(logit_of(own)) : 0.0f;
    const Mass mass = __float2ull_rn(weight * kMassUnit);
    Mass* masses = shared_.bin_mass;
    masses[i] = mass;
    __syncthreads();
    Mass before = 0;
    int place = 0;
    for (int j = 0; j < n; ++j) {
      if (shared_.list[j] > own) {
        before += masses[j];
        ++place;
      }
    }
    bool kept = i < n && (!has_top_k() || place < row_.top_k);
    if (has_top_p()) {
      if (has_top_k()) {
        // The total is that of the first top_k: up to and with the last of them.
        if (i < n && place == min(n, row_.top_k) - 1) shared_.found_mass = before + mass;
        __syncthreads();
        total_ = shared_.found_mass;
      }
      kept = kept && (place == 0 || static_cast<double>(before) < static_cast<double>(row_.top_p) *
                                                                      static_cast<double>(total_));
    }
    const Mass kept_mass = kept && weight >= row_.min_p ? mass : 0;
    __syncthreads();
    masses[i] = kept_mass;
    if (i == 0) shared_.found = -1;
    __syncthreads();
    before = 0;
    Mass total = 0;
    for (int j = 0; j < n; ++j) {  // in order of id: the low half is larger for a lower one
      total += masses[j];
      if (static_cast<uint32_t>(shared_.list[j]) > static_cast<uint32_t>(own)) before += masses[j];
    }
    const Mass target = target_in(total);
    if (kept_mass > 0 && before <= target && target < before + kept_mass) {
      shared_.found = static_cast<int>(~0u - static_cast<uint32_t>(own));
    }
    __syncthreads();
    return shared_.found >= 0 ? shared_.found : first_largest();
  }

  __device__ int draw_from_candidates() {
    int n = shared_.num_listed;
    sort_list(shared_, n);
    constexpr double kAll = 1e300;
    Mass mass;
    if (has_top_k()) {
      n = min(n, row_.top_k);
      if (has_top_p()) count_for_mass(n, 0, kAll, total_);
    }
    if (has_top_p()) {
      n = count_for_mass(n, 0, static_cast<double>(row_.top_p) * static_cast<double>(total_), mass);
    }
    // In order of id now: the high half of the number is that of the id, the low half the weight.
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const Order order = shared_.list[i];
      const float weight = weight_of(logit_of(order));
      shared_.list[i] = order << 32 | (weight >= row_.min_p ? __float_as_uint(weight) : 0u);
    }
    sort_list(shared_, n);
    const auto mass_at = [this](int i) {
      return __float2ull_rn(__uint_as_float(static_cast<uint32_t>(shared_.list[i])) * kMassUnit);
    };
    Mass total = 0;
    for (int i = threadIdx.x; i < n; i += kThreads) total += mass_at(i);
    const int at = pick(n, mass_at, target_in(sum_block(shared_, total)));
    return at < 0 ? first_largest()
                  : static_cast<int>(~0u - static_cast<uint32_t>(shared_.list[at] >> 32));
  }

  // floor(u * total): the running sum must exceed it.
  __device__ Mass target_in(Mass total) const {
    const Mass target = static_cast<Mass>(u_ * static_cast<double>(total));
    return total > 0 && target >= total ? total - 1 : target;  // u * total may round up to total
  }

  // The first i < n at which the running sum of mass_at(i) exceeds `target`; without one the last i
  // that has any mass, or -1. found_mass is what is left of the target at i.
  template <typename MassAt>
  __device__ int pick(int n, MassAt mass_at, Mass target) {
    const int each = (n + kThreads - 1) / kThreads;
    const int begin = min(n, static_cast<int>(threadIdx.x) * each), end = min(n, begin + each);
    Mass own = 0;
    for (int i = begin; i < end; ++i) own += mass_at(i);
    Mass before = sum_before(shared_.warp_values, own);
    int last = -1;
    if (threadIdx.x == 0) shared_.found = -1;
    __syncthreads();
    for (int i = begin; i < end; ++i) {
      const Mass mass = mass_at(i);
      if (mass == 0) continue;
      last = i;
      if (before <= target && target < before + mass) {  // true once
        shared_.found = i;
        shared_.found_mass = target - before;
      }
      before += mass;
    }
    __syncthreads();
    const int found = shared_.found;
    return found >= 0 ? found : -min_block(shared_, -last);
  }

  // Draws among all tokens from `cutoff` on, in order of id: a chunk, then a token in it. bin_mass
  // holds the masses of the chunks if they are summed already.
  __device__ int draw_from_row(Order cutoff, bool summed) {
    const auto kept_mass = [&](float x, int id) -> Mass {
      if (order_of(x, id) < cutoff || weight_of(x) < row_.min_p) return 0;
      return mass_of(x);
    };
    if (!summed) {
      __syncthreads();
      for (int c = threadIdx.x / 32; c < p_.num_chunks; c += kWarps) {
        Mass sum = 0;
#pragma unroll 4
        for (int i = threadIdx.x % 32 * 4; i < kChunk; i += 128) {
          const int id = c * kChunk + i;
          const float4 x = load_logits(p_, logits_, id);
          sum += kept_mass(x.x, id) + kept_mass(x.y, id + 1) + kept_mass(x.z, id + 2) +
                 kept_mass(x.w, id + 3);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (threadIdx.x % 32 == 0) shared_.bin_mass[c] = sum;
      }
      __syncthreads();
      Mass sum = 0;
      for (int c = threadIdx.x; c < p_.num_chunks; c += kThreads) sum += shared_.bin_mass[c];
      total_ = sum_block(shared_, sum);
    }
    if (total_ == 0) return first_largest();
    __syncthreads();
    const int chunk =
        pick(p_.num_chunks, [this](int c) { return shared_.bin_mass[c]; }, target_in(total_));
    const Mass rest = shared_.found_mass;
    const auto mass_at = [&](int i) {
      const int id = chunk * kChunk + i;
      return id < p_.vocab_size ? kept_mass(fmaxf(logits_[id], kNone), id) : Mass{0};
    };
    const int at = pick(kChunk, mass_at, rest);
    return at < 0 ? first_largest() : chunk * kChunk + at;
  }

  // The last token, in order, that is needed to reach `wanted` by count or mass, counted from the
  // top of the row; it is in [low, high], and nothing is above that. Sets `mass` to that of the
  // tokens up to it. Reads the row once for every factor of 1024 in the range.
  __device__ Order cut_crowd(Order low, Order high, bool by_mass, double wanted, Mass& mass) {
    Mass above = 0;
    uint32_t count_above = 0, count_within;
    do {
      const int shift = shift_for(high - low);
      clear_bins();
#pragma unroll 4
      for (int i = threadIdx.x * 4; i < p_.vocab_size; i += kThreads * 4) {
        const float4 x = load_logits(p_, logits_, i);
        const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const Order order = order_of(values[c], i + c);
          if (order < low || order > high) continue;
          count_in(static_cast<int>((order - low) >> shift), mass_of(values[c]));
        }
      }
      __syncthreads();
      const double rest =
          wanted - (by_mass ? static_cast<double>(above) : static_cast<double>(count_above));
      const int bin = find_bin(by_mass, rest);
      above += shared_.found_mass;
      count_above += shared_.found_count;
      count_within = shared_.bin_count[bin];
      low += static_cast<Order>(bin) << shift;
      high = min(high, low + ((Order{1} << shift) - 1));
    } while (count_within > kMaxListed);
    __syncthreads();
    if (threadIdx.x == 0) shared_.num_listed = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < p_.vocab_size; i += kThreads * 4) list_within(i, low, high);
    __syncthreads();
    int n = shared_.num_listed;
    sort_list(shared_, n);
    if (!by_mass) {
      n = min(n, max(1, static_cast<int>(wanted) - static_cast<int>(count_above)));
      wanted = 1e300;
    }
    n = count_for_mass(n, above, wanted, mass);
    mass += above;
    return n > 0 ? shared_.list[n - 1] : low;
  }

  __device__ int draw_from_crowd(uint32_t bound) {
    Order cutoff = static_cast<Order>(bound) << 32;
    const Order first = static_cast<Order>(rank_of(largest_)) << 32 | ~0u;
    if (has_top_k()) cutoff = cut_crowd(cutoff, first, false, row_.top_k, total_);
    if (has_top_p()) {
      Mass mass;
      cutoff = cut_crowd(cutoff, first, true,
                         static_cast<double>(row_.top_p) * static_cast<double>(total_), mass);
    }
    return draw_from_row(cutoff, false);
  }

  const SampleParams& p_;
  Shared& shared_;
  const float* const logits_;          // [vocab_size]
  const float* const lane_maxima_;     // [num_chunks, 32]
  const float2* const chunk_max_sum_;  // [num_chunks]
  const RowParams row_;
  const float scale_log2_;
  const double u_;
  float own_lanes_[kOwnLanes];  // maxima of lanes threadIdx.x + j * kThreads
  float largest_;
  Mass total_;  // of what top_p is a share of
};

// ---- Kernels and launcher -----------------------------------------------------------------------

// What a lane has seen of a chunk: the maximum, and the sum of 2^((x - max) * scale).
struct LaneSurvey {
  float largest = kNone, sum = 0.0f;

  __device__ __forceinline__ void add(const float4 (&x)[kSteps / 2], bool sums, float scale) {
    const float before = largest;
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      largest = fmaxf(largest, fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));  // no NaN
    }
    if (!sums) return;
    const float origin = largest == kNone ? 0.0f : largest;  // -inf - -inf would be NaN
    const auto weight = [=](float logit) {
      return exp2_approx((fmaxf(logit, kNone) - origin) * scale);
    };
    sum *= weight(before);
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      sum += (weight(x[i].x) + weight(x[i].y)) + (weight(x[i].z) + weight(x[i].w));
    }
  }
};

// A warp takes every gridDim.x * 4th chunk. Of its 64 logits a lane always has 32 on their way
// while it looks at the other 32.
__global__ void __launch_bounds__(kSurveyThreads, kSurveyBlocksPerSm)
    survey_kernel(const __grid_constant__ SampleParams p) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int num_chunks = p.num_rows * p.num_chunks, warps = gridDim.x * (kSurveyThreads / 32);
  float4 x[2][kSteps / 2];
  const auto load = [&](int i, int half) {
    const int row = i / p.num_chunks, chunk = i % p.num_chunks;
    const float* logits = p.logits + row * p.row_stride;
    const int first = chunk * kChunk + half * (kChunk / 2) + lane * 4;
    if (p.vectors && (chunk + 1) * kChunk <= p.vocab_size) {
#pragma unroll
      for (int j = 0; j < kSteps / 2; ++j) {
        x[half][j] = *reinterpret_cast<const float4*>(logits + first + j * 128);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kSteps / 2; ++j) x[half][j] = load_logits(p, logits, first + j * 128);
    }
  };
  int i = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  if (i >= num_chunks) return;
  load(i, 0);
  load(i, 1);
  for (; i < num_chunks; i += warps) {
    const RowParams params(p, i / p.num_chunks);
    const bool sums = params.needs_sums();
    const float scale = params.scale_log2();
    const bool more = i + warps < num_chunks;
    LaneSurvey lanes;
    lanes.add(x[0], sums, scale);
    if (more) load(i + warps, 0);
    lanes.add(x[1], sums, scale);
    if (more) load(i + warps, 1);

    p.lane_maxima[static_cast<int64_t>(i) * 32 + lane] = lanes.largest;
    float largest = lanes.largest, sum = 0.0f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    if (sums) {
      sum = lanes.largest == kNone ? 0.0f
                                   : lanes.sum * exp2_approx((lanes.largest - largest) * scale);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (lane == 0) p.chunk_max_sum[i] = {largest, sum};
  }
}

// Block r draws from row r.
__global__ void __launch_bounds__(kThreads, 2) draw_kernel(const __grid_constant__ SampleParams p) {
  __shared__ Shared shared;
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int id = RowSampler(p, shared, blockIdx.x).draw();
  if (threadIdx.x == 0) p.token_ids[blockIdx.x] = id;
}

}  // namespace

void sample(const Tensor& token_ids, const Tensor& logits, const Tensor& temperature,
            const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
            const Tensor& step_idx, Stream stream) {
  const int64_t num_rows = logits.shape[0], vocab_size = logits.shape[1];
  if (num_rows == 0 || vocab_size == 0) return;
  if (vocab_size > kMaxVocabSize) {
    throw std::invalid_argument("sample: expected a vocabulary of at most " +
                                std::to_string(kMaxVocabSize) + ", got " +
                                std::to_string(vocab_size));
  }
  const Workspace& memory = workspace();
  const int64_t num_chunks = (vocab_size + kChunk - 1) / kChunk;
  const int64_t row_bytes = num_chunks * static_cast<int64_t>(32 * sizeof(float) + sizeof(float2));
  const int64_t max_rows = static_cast<int64_t>(Workspace::kScratchBytes) / row_bytes;
  // More rows than the workspace holds go in turns.
  for (int64_t first = 0; first < num_rows; first += max_rows) {
    const int64_t rows = std::min(max_rows, num_rows - first);
    SampleParams params{};
    params.token_ids = token_ids.ptr<int32_t>() + first;
    params.logits = logits.ptr<float>() + first * logits.strides[0];
    params.temperature = temperature.ptr<float>() + first;
    params.top_k = top_k.ptr<int32_t>() + first;
    params.top_p = top_p.ptr<float>() + first;
    params.min_p = min_p.ptr<float>() + first;
    params.seeds = seeds.ptr<int64_t>() + first;
    params.step_idx = step_idx.ptr<int32_t>() + first;
    params.chunk_max_sum = static_cast<float2*>(memory.scratch);
    params.lane_maxima = reinterpret_cast<float*>(params.chunk_max_sum + rows * num_chunks);
    params.row_stride = logits.strides[0];
    params.num_rows = static_cast<int>(rows);
    params.vocab_size = static_cast<int>(vocab_size);
    params.num_chunks = static_cast<int>(num_chunks);
    params.vectors = reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 &&
                     (num_rows == 1 || logits.strides[0] % 4 == 0);
    const int64_t blocks =
        std::min<int64_t>(kSurveyBlocksPerSm * num_multiprocessors(), rows * num_chunks);
    launch_early("sample", survey_kernel, dim3(static_cast<unsigned>(blocks)), kSurveyThreads, 0,
                 stream, params);
    launch_early("sample", draw_kernel, dim3(static_cast<unsigned>(rows)), kThreads, 0, stream,
                 params);
  }
}

}  // namespace tinyvllm::cuda
