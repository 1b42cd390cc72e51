// out[t][n] = sum over k of x[t][k] * weight[n][k] (+ bias[n]), rounded once to out's type. What
// stands before or after it in a model is fused: the sum may be added to what out holds, and gate
// and up projection of an MLP may leave as silu(gate) * up. A norm in front is a pass of its own,
// over a few rows.
//
// Layout. The weight is read in packed blocks of 16 output rows, [ceil(K/2)][16][2] bf16: a stream
// of 64-byte lines, each of which is one vector operand (simd.h). Rows past N and the k past an odd
// K are zero. One layout serves every number of tokens T:
//
//            one panel: 2 blocks = 32 outputs            x: a tile of up to 8 tokens
//        k:  [line][line][line] ...   block 0            row 0: x0x1 x2x3 ...
//            [line][line][line] ...   block 1            ...
//                                                        row 7: x0x1 x2x3 ...
//
// A gated weight's block is 8 rows of gate and the 8 rows of up that belong to them.
//
// Each step takes a line of both blocks and, for each token, one pair x[k], x[k+1] broadcast to all
// lanes: 16 dot instructions for 2 loads of weights. 16 accumulators are enough to hide the latency
// of 6 at 2 a cycle. Every output is one chain of additions, k ascending, whatever the tile: the
// bits of a row depend neither on T nor on the threads.
//
// Work. Up to 8 tokens: ranges of blocks, each block one tile, so that a thread reads one stream of
// weights and is bound by the memory. More: an item is one panel times up to 128 tokens. The panel
// (2 * K * 32 bytes) stays in the second-level cache while its tiles pass over it, and the first
// tiles fetch the next panel, so at 16 tokens the weights still stream, and at 1,000 they are free.
#ifdef TINYVLLM_ISA
#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

// Packs one block; `rows` are its 16 rows.
void pack_block(uint32_t* packed, const bf16_t* const* rows, int64_t block, int64_t k) {
  uint32_t* lines = packed + block * ((k + 1) / 2) * kLineWords;
  pack_lines(lines, rows, k / 2);
  if (k % 2 != 0) {
    for (int i = 0; i < kLineRows; ++i) lines[k / 2 * kLineWords + i] = rows[i][k - 1];
  }
}

TINYVLLM_INLINE void store_value(const LinearParams& p, int64_t at, float value) {
  if (p.out_is_float) {
    static_cast<float*>(p.out)[at] = value;
    return;
  }
  bf16_t* out = static_cast<bf16_t*>(p.out) + at;
  if (p.epilogue == Epilogue::kAdd) value += bf16_to_float(*out);
  *out = float_to_bf16(value);
}

// The outputs of a block that is cut off by N.
__attribute__((noinline)) void store_last_block(const LinearParams& p, int64_t token, int64_t n,
                                                const float* values) {
  for (int64_t i = 0; i < p.n - n; ++i) {
    const float value = p.bias == nullptr ? values[i] : values[i] + bf16_to_float(p.bias[n + i]);
    store_value(p, token * p.out_stride + n + i, value);
  }
}

// Rounds one token's 16 outputs of a block and stores those that exist.
TINYVLLM_INLINE void store_block(const LinearParams& p, int64_t token, int64_t block, F16 acc) {
  const int64_t n = block * kLineRows;
  if (n + kLineRows > p.n) {
    float values[kLineRows];
    store16(values, acc);
    store_last_block(p, token, n, values);
    return;
  }
  if (p.bias != nullptr) acc = add(acc, load16_bf16(p.bias + n));
  const int64_t at = token * p.out_stride + n;
  if (p.out_is_float) {
    store16(static_cast<float*>(p.out) + at, acc);
    return;
  }
  bf16_t* out = static_cast<bf16_t*>(p.out) + at;
  if (p.epilogue == Epilogue::kAdd) acc = add(acc, load16_bf16(out));
  store16_bf16(out, acc);
}

// x * sigmoid(x); with e = exp(-|x|), which never overflows, sigmoid is 1 / (1 + e) for x >= 0 and
// e / (1 + e) for x < 0.
TINYVLLM_INLINE F16 silu(F16 x) {
  constexpr float kLog2E = 1.44269504f;
  const F16 e = exp2_nonpositive(mul(max(sub(zero16(), x), x), set16(-kLog2E)));
  F16 result;
  for (int part = 0; part < kParts; ++part) {
    const auto numerator = x.v[part] < 0.0f ? x.v[part] * e.v[part] : x.v[part];
    result.v[part] = numerator / (e.v[part] + 1.0f);
  }
  return result;
}

// The same for one token's sums of a gated weight: 8 outputs a block.
template <int kBlocks>
TINYVLLM_INLINE void store_gated(const LinearParams& p, int64_t token, int64_t block,
                                 const F16 (&acc)[kBlocks]) {
  const int64_t n = block * kGatedRows, left = std::min(p.n - n, kBlocks * kGatedRows);
  F16 gate = low_halves(acc[0], acc[kBlocks - 1]), up = high_halves(acc[0], acc[kBlocks - 1]);
  if (p.bias != nullptr) {
    gate = add(gate, load_bf16(p.bias + n, left));
    up = add(up, load_bf16(p.bias + p.n + n, left));
  }
  store_bf16(static_cast<bf16_t*>(p.out) + token * p.out_stride + n, mul(silu(gate), up), left);
}

// Fetches the same line of `count` blocks at each step.
struct FetchBlocks {
  const uint32_t* blocks;
  int64_t block_words;
  int count;

  TINYVLLM_INLINE void operator()(int64_t k) const {
    for (int b = 0; b < count; ++b) prefetch_l2(blocks + b * block_words + k * kLineWords);
  }
};

template <int kBlocks, int kRows>
void linear_tile(const LinearParams& p, int64_t token, int64_t block, const uint32_t* ahead,
                 int ahead_blocks) {
  const int64_t block_words = (p.k + 1) / 2 * kLineWords;
  const uint32_t* w = p.packed + block * block_words;
  const bf16_t* x = p.x + token * p.x_stride;
  F16 acc[kRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) acc[r][b] = zero16();
  }
  dot_tile<kBlocks, kRows>(acc, w, block_words, x, p.x_stride, p.k / 2,
                           FetchBlocks{ahead, block_words, ahead_blocks});
  if (p.k % 2 != 0) {
    bf16_t last[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      last[r][0] = x[r * p.x_stride + p.k - 1];
      last[r][1] = 0;
    }
    dot_tile<kBlocks, kRows>(acc, w + p.k / 2 * kLineWords, block_words, last[0], 2, 1,
                             FetchBlocks{});
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (p.epilogue == Epilogue::kGate) {
      store_gated(p, token + r, block, acc[r]);
      continue;
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) store_block(p, token + r, block + b, acc[r][b]);
  }
}

// The tile functions by number of tokens.
using TileFunction = void (*)(const LinearParams&, int64_t, int64_t, const uint32_t*, int);
template <int kBlocks>
constexpr TileFunction kTiles[kLinearTileTokens + 1] = {
    nullptr,
    linear_tile<kBlocks, 1>,
    linear_tile<kBlocks, 2>,
    linear_tile<kBlocks, 3>,
    linear_tile<kBlocks, 4>,
    linear_tile<kBlocks, 5>,
    linear_tile<kBlocks, 6>,
    linear_tile<kBlocks, 7>,
    linear_tile<kBlocks, 8>,
};

// Blocks [begin, end) for so few tokens that one tile takes them all: one stream of lines, fetched
// well ahead, across the borders of blocks.
void linear_few_tokens(const LinearParams& p, int64_t begin, int64_t end) {
  const int64_t block_words = (p.k + 1) / 2 * kLineWords;
  for (int64_t block = begin; block < end; ++block) {
    kTiles<1>[p.t](p, 0, block, p.packed + block* block_words + kAheadWords, 1);
  }
}

// Items [begin, end) of the grid panels x token groups, the panel's groups one after the other.
void linear_many_tokens(const LinearParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = p.blocks;
  const int64_t groups = (p.t + kLinearGroupTokens - 1) / kLinearGroupTokens;
  const int64_t block_words = (p.k + 1) / 2 * kLineWords;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t block = item / groups * kLinearPanelBlocks;
    const int64_t first = item % groups * kLinearGroupTokens;
    const int64_t last = std::min(first + kLinearGroupTokens, p.t);
    const auto& tiles = blocks - block == 1 ? kTiles<1> : kTiles<2>;
    const int64_t next_block = block + kLinearPanelBlocks;
    const bool has_next = item + groups < end && next_block < blocks;
    const uint32_t* ahead = p.packed + next_block * block_words;
    int64_t ahead_blocks =
        has_next ? std::min<int64_t>(kLinearPanelBlocks, blocks - next_block) : 0;
    for (int64_t token = first; token < last; token += kLinearTileTokens) {
      // The first tiles fetch a block of the next panel each.
      const int fetched = ahead_blocks > 0 ? 1 : 0;
      tiles[std::min<int64_t>(last - token, kLinearTileTokens)](p, token, block, ahead, fetched);
      ahead += fetched * block_words;
      ahead_blocks -= fetched;
    }
  }
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../ops.h"
#include "huge_pages.h"
#include "isa.h"
#include "simd.h"
#include "simd_tail.h"
#include "thread_pool.h"

namespace tinyvllm::cpu {
namespace {

constexpr int kLinearPanelBlocks = 2;
constexpr int64_t kGatedRows = 8;  // of gate, and of up, in a block of a gated weight
constexpr int kLinearTileTokens = 8;
constexpr int kLinearGroupTokens = 128;

// How far ahead of its use a line is fetched when there is one tile: far enough for the memory,
// near enough for the first-level cache.
constexpr int64_t kAheadWords = 16 * 1024 / 4;

// How much weight a thread takes at least: some microseconds of memory traffic, far above the cost
// of claiming a range. And how many ranges there are for each thread: a range starts with nothing
// fetched, so few of them, but a thread that is late must find some taken by others.
constexpr int64_t kGrainBytes = 64 * 1024;
constexpr int64_t kRangesPerThread = 2;

// What becomes of a sum (and its bias): out, out + sum, or silu(gate) * up of two of them.
enum class Epilogue : uint8_t { kStore, kAdd, kGate };

struct LinearParams {
  void* out;               // [t, n] bf16, or f32 with kStore
  const bf16_t* x;         // [t, k]
  const uint32_t* packed;  // [blocks, ceil(k/2), 16] pairs of bf16
  const bf16_t* bias;      // [n], [2 n] with kGate, or nullptr
  int64_t out_stride, x_stride;
  int64_t t, n, k, blocks;
  bool out_is_float;
  Epilogue epilogue;
};

}  // namespace
}  // namespace tinyvllm::cpu

#define TINYVLLM_ISA_FILE "linear.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {

namespace {

// row_of(block, i) is the row of `weight` that becomes row i of a block, or -1: zeros.
template <typename RowOf>
void pack(const Tensor& packed, const Tensor& weight, RowOf row_of) {
  const int64_t k = weight.shape[1];
  const std::vector<bf16_t> zeros(k);
  advise_huge_pages(packed.data, packed.numel() * sizeof(bf16_t));
  const auto kernel = TINYVLLM_DISPATCH(pack_block);
  parallel_for(packed.shape[0], 4, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const bf16_t* rows[kLineRows];
      for (int i = 0; i < kLineRows; ++i) {
        const int64_t row = row_of(block, i);
        rows[i] = row < 0 ? zeros.data() : weight.ptr<bf16_t>() + row * weight.strides[0];
      }
      kernel(packed.ptr<uint32_t>(), rows, block, k);
    }
  });
}

void run_linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias,
                Epilogue epilogue) {
  const LinearParams p{
      .out = out.data,
      .x = x.ptr<bf16_t>(),
      .packed = packed.ptr<uint32_t>(),
      .bias = bias == nullptr ? nullptr : bias->ptr<bf16_t>(),
      .out_stride = out.strides[0],
      .x_stride = x.strides[0],
      .t = x.shape[0],
      .n = out.shape[1],
      .k = x.shape[1],
      .blocks = packed.shape[0],
      .out_is_float = out.dtype == DType::kFloat32,
      .epilogue = epilogue,
  };
  if (p.t == 0 || p.n == 0) return;
  const int64_t block_bytes = std::max<int64_t>(1, (p.k + 1) / 2 * kLineWords * 4);
  const int64_t ranges = kRangesPerThread * num_threads();
  if (p.t <= kLinearTileTokens) {
    const auto kernel = TINYVLLM_DISPATCH(linear_few_tokens);
    const int64_t grain = std::max((p.blocks + ranges - 1) / ranges, kGrainBytes / block_bytes);
    parallel_for(p.blocks, grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    return;
  }
  const int64_t panels = (p.blocks + kLinearPanelBlocks - 1) / kLinearPanelBlocks;
  const int64_t groups = (p.t + kLinearGroupTokens - 1) / kLinearGroupTokens;
  const auto kernel = TINYVLLM_DISPATCH(linear_many_tokens);
  // With many tokens the weights no longer stream, and small ranges share the work more evenly.
  const int64_t grain = groups == 1 ? (panels + ranges - 1) / ranges : 1;
  parallel_for(panels * groups, grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

}  // namespace

void pack_linear(const Tensor& packed, const Tensor& weight) {
  const int64_t n = weight.shape[0];
  pack(packed, weight, [n](int64_t block, int i) {
    const int64_t row = block * kLineRows + i;
    return row < n ? row : -1;
  });
}

void pack_gated_linear(const Tensor& packed, const Tensor& weight) {
  const int64_t n = weight.shape[0] / 2;
  pack(packed, weight, [n](int64_t block, int i) {
    const int64_t row = block * kGatedRows + i % kGatedRows;
    return row >= n ? -1 : i < kGatedRows ? row : n + row;
  });
}

void linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias) {
  run_linear(out, x, packed, bias, Epilogue::kStore);
}

void linear_add(const Tensor& residual, const Tensor& x, const Tensor& packed, const Tensor* bias) {
  run_linear(residual, x, packed, bias, Epilogue::kAdd);
}

void norm_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                 const Tensor& norm_weight, const Tensor& packed, const Tensor* bias, float eps) {
  rms_norm(normed, x, norm_weight, eps);
  run_linear(out, normed, packed, bias, Epilogue::kStore);
}

void norm_gated_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                       const Tensor& norm_weight, const Tensor& packed, const Tensor* bias,
                       float eps) {
  rms_norm(normed, x, norm_weight, eps);
  run_linear(out, normed, packed, bias, Epilogue::kGate);
}

}  // namespace tinyvllm::cpu

#endif
