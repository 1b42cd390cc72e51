// out[t][n] = sum over k of x[t][k] * weight[n][k] (+ bias[n]), rounded once to out's type.
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

namespace tinyvllm::cpu::TINYVLLM_ISA {

// `zeros`, k of them, stand for the rows that the last block lacks.
void pack_block(uint32_t* packed, const bf16_t* weight, int64_t row_stride, int64_t block,
                int64_t n, int64_t k, const bf16_t* zeros) {
  const bf16_t* rows[kLineRows];
  for (int i = 0; i < kLineRows; ++i) {
    const int64_t row = block * kLineRows + i;
    rows[i] = row < n ? weight + row * row_stride : zeros;
  }
  uint32_t* lines = packed + block * ((k + 1) / 2) * kLineWords;
  pack_lines(lines, rows, k / 2);
  if (k % 2 != 0) {
    for (int i = 0; i < kLineRows; ++i) lines[k / 2 * kLineWords + i] = rows[i][k - 1];
  }
}

TINYVLLM_INLINE void store_value(const LinearParams& p, int64_t at, float value) {
  if (p.out_is_float) {
    static_cast<float*>(p.out)[at] = value;
  } else {
    static_cast<bf16_t*>(p.out)[at] = float_to_bf16(value);
  }
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
  } else {
    store16_bf16(static_cast<bf16_t*>(p.out) + at, acc);
  }
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
  const int64_t blocks = (p.n + kLineRows - 1) / kLineRows;
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
#include "thread_pool.h"

namespace tinyvllm::cpu {
namespace {

constexpr int kLinearPanelBlocks = 2;
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

struct LinearParams {
  void* out;               // [t, n] bf16 or f32
  const bf16_t* x;         // [t, k]
  const uint32_t* packed;  // [ceil(n/16), ceil(k/2), 16] pairs of bf16
  const bf16_t* bias;      // [n] or nullptr
  int64_t out_stride, x_stride;
  int64_t t, n, k;
  bool out_is_float;
};

}  // namespace
}  // namespace tinyvllm::cpu

#define TINYVLLM_ISA_FILE "linear.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {

void pack_linear(const Tensor& packed, const Tensor& weight) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const std::vector<bf16_t> zeros(n % kLineRows == 0 ? 0 : k);
  advise_huge_pages(packed.data, packed.numel() * sizeof(bf16_t));
  const auto pack = TINYVLLM_DISPATCH(pack_block);
  parallel_for((n + kLineRows - 1) / kLineRows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      pack(packed.ptr<uint32_t>(), weight.ptr<bf16_t>(), weight.strides[0], block, n, k,
           zeros.data());
    }
  });
}

void linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias) {
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
      .out_is_float = out.dtype == DType::kFloat32,
  };
  if (p.t == 0 || p.n == 0) return;
  const int64_t blocks = (p.n + kLineRows - 1) / kLineRows;
  const int64_t block_bytes = std::max<int64_t>(1, (p.k + 1) / 2 * kLineWords * 4);
  const int64_t ranges = kRangesPerThread * num_threads();
  if (p.t <= kLinearTileTokens) {
    const auto kernel = TINYVLLM_DISPATCH(linear_few_tokens);
    const int64_t grain = std::max({(blocks + ranges - 1) / ranges, kGrainBytes / block_bytes});
    parallel_for(blocks, grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    return;
  }
  const int64_t panels = (blocks + kLinearPanelBlocks - 1) / kLinearPanelBlocks;
  const int64_t groups = (p.t + kLinearGroupTokens - 1) / kLinearGroupTokens;
  const auto kernel = TINYVLLM_DISPATCH(linear_many_tokens);
  // With many tokens the weights no longer stream, and small ranges share the work more evenly.
  const int64_t grain = groups == 1 ? (panels + ranges - 1) / ranges : 1;
  parallel_for(panels * groups, grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

}  // namespace tinyvllm::cpu

#endif
