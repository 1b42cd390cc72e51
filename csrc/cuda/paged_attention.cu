// out[t,h] = sum over keys j of softmax(q[t,h] . k[j,h'] * softmax_scale)[j] * v[j,h'], where j
// runs over the keys that token t may see and h' = h / group is the kv head that its query head
// shares.
//
// Layout. k_cache and v_cache are [num_blocks, block_size, num_kv_heads, head_dim] bf16; key j of
// sequence s lies in block block_tables[s][j / block_size]. Keys are taken in tiles of 64, aligned
// to absolute positions; four tiles make a split, from key 16384 on eight. The queries of one kv
// head are rows, `group` for each token.
//
//   keys   0 ......... 63 | 64 ....... 127 | 128 ...... 191 | 192 ...... 255 | 256 ...
//          [ tile 0      ]  [ tile 1      ]  [ tile 2      ]  [ tile 3      ]  [ tile 4
//          [ split 0                                                       ]  [ split 1
//
// 16 rows pass over a tile as fragments of a matrix product:
//
//   s [16,64] = q [16,head_dim] k^T    then p = 2^(s * scale_log2 - m), the online softmax, in fp32
//   acc [16,head_dim] += bf16(p) v     where 4 lanes share a row, each with a quarter of s
//
// Within a split a row carries a running maximum m, a sum l and acc. Finished splits are merged in
// ascending order. A sequence with several queries makes row tiles, one with a single query
// (decode) makes splits; the arithmetic is the same.
//
//   attend_row_tiles_wgmma_kernel   sm_90. A block takes 192 rows (128 for head_dim 128) of one kv
//     head, 64 for each four warps. Four more warps copy tiles of keys into a ring of six stages
//     (four). The values of a tile and the keys of the next are multiplied without a gap.
//
//   attend_row_tiles_kernel   Everywhere else. 128 rows (64), a ring of three stages (two), and all
//     four warps copy and compute.
//
//     In both each warp merges its rows' splits as it goes; the merged total waits in shared
//     memory.
//
//   attend_splits_kernel      A block takes up to 16 rows of one query and kv head after the other.
//     A fifth warp copies: it finds the queries, walks their block tables and, from sm_90 on, asks
//     the copy engine for 16 keys of the head at a time. Its ring goes on into the next run of
//     splits. Of a tile each of the other four warps multiplies 16 keys with q, and then p, of all
//     64 keys, with a quarter of v's columns:
//
//       memory --copies--> [k, v, q] [k, v] [k, v] [k, v, q of the next run] ..  --> four warps
//
//     The splits of all queries, laid end to end, are cut into equal ranges, one for every group of
//     blocks; the blocks of a group take one kv head each.
//
//       query   | 0                | 1        | 2     | 3                |
//       range   [  group 0  ][  group 1  ][  group 2    ][  group 3      ]
//
//     Query 2 lies in one range: its rows are merged and stored at once. Of a query that is divided
//     the first range leaves one part, all of its splits merged, and the others one for each split.
//     The block that brings the last of them merges the parts, once its own range is done.
//
// A row's bits depend on the row alone, however its prompt was cut and whatever runs beside it:
// boundaries are absolute, a row of a product does not see the other rows, mma and wgmma round
// alike, keys that a row may not see add p = 0, and merging is the same fused multiply-adds
// wherever it is done.
//
// What may lie in the caches. Of a block of 16 keys that is partly seen all may be fetched; what is
// not seen, NaN too, is replaced by zeros or hidden by the mask. In row tiles v must be finite in
// front of a row's window, where other rows see it.
//
// Work list. The grids depend on the sizes of the tensors alone, so a graph can hold them; warps
// find their work by scanning the lengths, 32 sequences at a time, and blocks without any end. A
// call with no more tokens than sequences (decode) launches no row tiles: should a sequence have
// several queries there after all, each is a query of its own.
//
// Early. In a decode call the work list and the keys of earlier steps are read before the kernels
// ahead have ended; q and the keys of this step wait for them. In a mixed call splits run beside
// row tiles. The kernel behind may start once q may be asked for: were it earlier, q would wait
// behind its weights. One short sequence is quicker with it at once.
//
// Few sequences. Up to 16 of them, in a decode call with head_dim 64, have rings of four slots:
// such a block leaves room for one of a `linear` on its multiprocessor.
//
// Memory (head_dim 64 | 128). Row tiles on wgmma: 512 threads of 128 registers (160 to compute, 32
// to copy) | 384 of 168 (232, 40), 144 | 192 KiB of shared memory, one block per SM. Row tiles: 128
// threads of 254 | 222, 80 | 96 KiB, two. Splits: 160 threads of 140 | 165, 111 KiB, two; of few
// sequences 107 registers and 75 KiB. Workspace: min(group, 16) * (head_dim + 2) floats for each
// split. If those of all splits would not fit, ranges end with queries and nothing is divided: as
// right, less parallel.
#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "launch.cuh"
#include "ops.h"
#include "tensor_cores.cuh"
#include "tensor_map.h"
#include "workspace.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kTileKeys = 64;
// Splits are of 4 tiles up to tile 256, of 8 from there on: fine ones feed more blocks, coarse ones
// leave less to merge.
constexpr int kFineTiles = 256, kFineSplit = 4, kCoarseSplit = 8;
constexpr int kBlockRows = 16;  // of an mma, and keys that surely lie in one block of the cache
constexpr int kTileBlocks = kTileKeys / kBlockRows;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kPanelBytes =
    kTileKeys * 128;  // 64 columns of k or of v, as they lie in shared memory
constexpr float kNone = -INFINITY;
constexpr unsigned kAllLanes = ~0u;

template <int kHeadDim>
struct Sizes {
  static constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, in a row
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kRowBlocks = kHeadDim == 64 ? 2 : 1;  // of 16 rows, for a warp of a row tile
  static constexpr int kTileRows = kWarps * kRowBlocks * 16;
  static constexpr int kStages = kHeadDim == 64 ? 3 : 2;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;   // of k or of v
  static constexpr int kTotals = kRowBlocks * kHeadDim / 2;  // floats of acc, for a thread
  static constexpr int kSharedBytes = kStages * 2 * kTileBytes + kThreads * kTotals * 4;
  static_assert(kTileRows * kRowBytes <= 2 * kTileBytes, "the q of a row tile fits a stage");
};

// Slots of the rings of attend_splits_kernel. With few sequences a step waits for latencies, not
// for the memory: a block of a small ring and few registers shares a multiprocessor with one of the
// kernel that follows, whose weights are then on their way.
constexpr int kFewSequences = 16;
template <int kHeadDim>
constexpr int kLargeRing = kHeadDim == 64 ? 6 : 3;
template <int kHeadDim>
constexpr int kSmallRing = kHeadDim == 64 ? 4 : 2;

// Of attend_splits_kernel. A slot of a block's ring holds the k and the v of a tile, and the q of a
// run that begins there.
template <int kHeadDim, int kRing>
struct SplitSizes {
  static constexpr int kThreads = (kWarps + 1) * 32;  // the last warp copies
  static constexpr int kBlocksPerSM = 2;
  static constexpr int kTileBytes = kTileKeys * kHeadDim * 2;
  static constexpr int kSlotBytes = 2 * kTileBytes + kBlockRows * kHeadDim * 2;
  static constexpr int kColumns = kHeadDim / kWarps;  // of acc, that a warp sums
  static constexpr int kSharedBytes = kRing * kSlotBytes;
};

struct AttentionParams {
  __nv_bfloat16* out;            // [T, num_heads, head_dim], token stride out_stride
  const __nv_bfloat16* q;        // [T, num_heads, head_dim], token stride q_stride
  const __nv_bfloat16* k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim]
  const __nv_bfloat16* v_cache;  // the same
  const int32_t* block_tables;   // [S, max_blocks], row stride table_stride
  const int32_t* cu_seqlens_q;   // [S + 1]
  const int32_t* seq_lens;       // [S]
  float* parts;                  // [max_slots, part_floats]: acc [rows, head_dim], (m, l) [rows, 2]
  uint32_t* counters;            // [queries, head_units], 0 between calls: splits that are done
                                 // and, from bit 16 on, of them those in the first part
  int64_t out_stride, q_stride, table_stride;
  int num_seqs, num_kv_heads, group;
  int head_units;   // num_kv_heads * ceil(group / 16): what a warp takes of a query
  int block_shift;  // log2(block_size)
  int window;       // <= 0: none
  int part_floats, max_slots;
  int max_counters;
  bool only_splits;  // every query is a query of its own, there are no row tiles
  float scale_log2;  // softmax_scale * log2(e)
};

// Of attend_splits_kernel.
struct SplitParams {
  // Before sm_90 unused. [num_blocks * block_size, num_kv_heads * head_dim], boxes of 16 x 64,
  // which become 16 rows of 128 swizzled bytes.
  CUtensorMap k_map, v_map;
  AttentionParams attention;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

// ---- The arithmetic of a tile -------------------------------------------------------------------

// What 16 * kBlocks rows have summed up. Lane 4 * g + t holds rows g and g + 8 of every block, and
// of their acc the columns 8n + 2t, 8n + 2t + 1; `sum` is over the lane's own keys until sum_lanes.
template <int kHeadDim, int kBlocks>
struct Rows {
  float max[kBlocks][2];  // in units of log2
  float sum[kBlocks][2];
  float acc[kBlocks][kHeadDim / 8][4];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[b][h] = kNone;
        sum[b][h] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[b][n][i] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void sum_lanes() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[b][h] += __shfl_xor_sync(kAllLanes, sum[b][h], 1);
        sum[b][h] += __shfl_xor_sync(kAllLanes, sum[b][h], 2);
      }
    }
  }
};

template <int kHeadDim, int kBlocks>
using QueryFragments = Fragment4[kBlocks][kHeadDim / 16];

// 16 rows of shared memory as the a side of an mma.
template <int kHeadDim>
__device__ __forceinline__ void load_queries(Fragment4 (&q)[kHeadDim / 16], uint32_t rows) {
  const int lane = lane_id(), row = lane % 16, chunk = lane / 16;
  const uint32_t address = rows + row * Sizes<kHeadDim>::kRowBytes + ((chunk ^ (row % 8)) * 16);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) load_matrices(q[k], address ^ (k * 32));
}

// Tiles of keys, and of values, lie in panels of 64 columns: rows of 128 bytes, their chunks
// swizzled.

// Columns 16 * block .. of s: the products with 16 keys.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void score_keys(float (&s)[kBlocks][kTileKeys / 8][4], int block,
                                           const QueryFragments<kHeadDim, kBlocks>& q,
                                           uint32_t keys) {
  const int lane = lane_id(), row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
  const uint32_t address = keys + row * 128 + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][2 * block][i] = s[b][2 * block + 1][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    Fragment4 f;
    load_matrices(f, (address ^ (k % 4 * 32)) + k / 4 * kPanelBytes);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      multiply_add(s[b][2 * block], q[b][k], f[0], f[1]);
      multiply_add(s[b][2 * block + 1], q[b][k], f[2], f[3]);
    }
  }
}

// Adds p [rows,16] x 16 values.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void add_values(Rows<kHeadDim, kBlocks>& rows,
                                           const Fragment4 (&p)[kBlocks][kTileBlocks], int block,
                                           uint32_t values) {
  const int lane = lane_id(), row = lane % 16, chunk = lane / 16;
  const uint32_t address = values + row * 128 + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    Fragment4 f;
    load_matrices_transposed(f, (address ^ (d % 4 * 32)) + d / 4 * kPanelBytes);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      multiply_add(rows.acc[b][2 * d], p[b][block], f[0], f[1]);
      multiply_add(rows.acc[b][2 * d + 1], p[b][block], f[2], f[3]);
    }
  }
}

// The order in which a lane sums its p of a tile: first those of each 16 keys.
__device__ __forceinline__ float sum_block(const float (&x)[4]) {
  return __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3]));
}
__device__ __forceinline__ float sum_tile(const float (&blocks)[kTileBlocks]) {
  return __fadd_rn(__fadd_rn(blocks[0], blocks[1]), __fadd_rn(blocks[2], blocks[3]));
}

// One step of the online softmax: s becomes p, and what was summed before shrinks. Lane 4 * g + t
// holds keys base + 8n + 2t, + 1 of s. A row sees keys (position - window, position]; kMasked is
// for tiles that some row does not see in full.
template <bool kMasked, int kHeadDim, int kBlocks>
__device__ __forceinline__ void softmax_step(Fragment4 (&p)[kBlocks][kTileBlocks],
                                             float (&s)[kBlocks][kTileKeys / 8][4],
                                             Rows<kHeadDim, kBlocks>& rows,
                                             const int (&position)[kBlocks][2], int base,
                                             int window, float scale_log2) {
  constexpr int kColumns = kTileKeys / 8;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float keep[2] = {1.0f, 1.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (kMasked) {
        const int last = position[b][h] - base - lane_id() % 4 * 2;
        const int before = window > 0 ? last - window : -kTileKeys - 1;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (8 * n + c > last || 8 * n + c <= before) s[b][n][2 * h + c] = kNone;
          }
        }
      }
      float largest = kNone;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        largest = fmaxf(largest, fmaxf(s[b][n][2 * h], s[b][n][2 * h + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const float max = fmaxf(rows.max[b][h], __fmul_rn(largest, scale_log2));
      const float origin = max == kNone ? 0.0f : max;  // -inf - -inf would be NaN
      keep[h] = exp2_approx(rows.max[b][h] - origin);
      rows.max[b][h] = max;
      float sums[kTileBlocks];  // of 16 keys each
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) {
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          x[c] = exp2_approx(__fmaf_rn(s[b][2 * i + c / 2][2 * h + c % 2], scale_log2, -origin));
        }
        p[b][i][h] = pack_bf16(x[0], x[1]);
        p[b][i][h + 2] = pack_bf16(x[2], x[3]);
        sums[i] = sum_block(x);
      }
      rows.sum[b][h] = __fmaf_rn(rows.sum[b][h], keep[h], sum_tile(sums));
    }
    // Most tiles bring no new maximum: times 1 changes nothing.
    if (__any_sync(kAllLanes, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rows.acc[b][n][i] = __fmul_rn(rows.acc[b][n][i], keep[i / 2]);
        }
      }
    }
  }
}

// Merging a finished split into the total of the splits before it.
struct Merge {
  float max, keep, take;

  __device__ __forceinline__ Merge(float total_max, float part_max) {
    max = fmaxf(total_max, part_max);
    const float origin = max == kNone ? 0.0f : max;
    keep = exp2_approx(total_max - origin);
    take = exp2_approx(part_max - origin);
  }
  __device__ __forceinline__ float operator()(float total, float part) const {
    return __fmaf_rn(part, take, __fmul_rn(total, keep));
  }
};

// A row that saw nothing (a negative position) becomes zeros.
__device__ __forceinline__ float inverse(float sum) { return sum > 0.0f ? __frcp_rn(sum) : 0.0f; }

// acc / sum, rounded; adding 0 makes one zero of two.
__device__ __forceinline__ uint32_t finish(float low, float high, float inverse_sum) {
  return pack_bf16(__fmaf_rn(low, inverse_sum, 0.0f), __fmaf_rn(high, inverse_sum, 0.0f));
}

// ---- The work list ------------------------------------------------------------------------------

// The first key that a query at `position` sees.
__device__ __forceinline__ int first_visible(const AttentionParams& p, int position) {
  return p.window > 0 ? max(0, position - p.window + 1) : 0;
}

// The sum of x over the lanes up to this one.
__device__ __forceinline__ int scan_lanes(int x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(kAllLanes, x, step);
    if (lane_id() >= step) x += below;
  }
  return x;
}

// Splits, counted from the first key of the sequence.
__device__ __forceinline__ int split_of(int tile) {
  return tile < kFineTiles ? tile / kFineSplit
                           : kFineTiles / kFineSplit + (tile - kFineTiles) / kCoarseSplit;
}

__device__ __forceinline__ int split_begin(int split) {
  constexpr int kFine = kFineTiles / kFineSplit;
  return split < kFine ? split * kFineSplit : kFineTiles + (split - kFine) * kCoarseSplit;
}

// Of a sequence, as they are in memory.
struct Lengths {
  int q_begin, q_end, seq_len;

  __device__ Lengths(const AttentionParams& p, int s) {
    s = min(s, p.num_seqs - 1);
    q_begin = __ldg(p.cu_seqlens_q + s);
    q_end = __ldg(p.cu_seqlens_q + s + 1);
    seq_len = __ldg(p.seq_lens + s);
  }

  // Asks here, not where the compiler sees the first use.
  static __device__ __forceinline__ Lengths load_now(const AttentionParams& p, int s) {
    s = min(s, p.num_seqs - 1);
    const auto load = [](const int32_t* from) {
      int x;
      asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(from));
      return x;
    };
    return {load(p.cu_seqlens_q + s), load(p.cu_seqlens_q + s + 1), load(p.seq_lens + s)};
  }

 private:
  __device__ Lengths(int begin, int end, int len) : q_begin(begin), q_end(end), seq_len(len) {}
};

// What a sequence asks of the kernels. The queries that go by splits are alike: each is given the
// tiles that any of them sees.
struct Sequence {
  int q_begin, q_len, seq_len;
  int queries;                // that go by splits
  int first_tile, num_tiles;  // of each of them
  int row_tiles;

  __device__ Sequence()
      : q_begin(0), q_len(0), seq_len(0), queries(0), num_tiles(0), row_tiles(0) {}

  // Nothing behind the last sequence.
  __device__ Sequence(const AttentionParams& p, const Lengths& lengths, int s, int tile_rows)
      : Sequence() {
    if (s >= p.num_seqs) return;
    q_begin = lengths.q_begin;
    q_len = max(0, lengths.q_end - q_begin);
    seq_len = lengths.seq_len;
    if (q_len == 1 || p.only_splits) {
      queries = q_len;
      first_tile = first_visible(p, seq_len - q_len) / kTileKeys;
      num_tiles = max(1, (seq_len + kTileKeys - 1) / kTileKeys - first_tile);
    } else {
      row_tiles = (q_len * p.group + tile_rows - 1) / tile_rows;
    }
  }

  // `tile` counts from first_tile here; it begins a split, or is num_tiles.
  __device__ int splits_before(int tile) const {
    return tile == 0 ? 0 : split_of(first_tile + tile - 1) + 1 - split_of(first_tile);
  }
  __device__ int num_splits() const { return splits_before(num_tiles); }

  // The first tile from `tile` on that begins a split, or num_tiles.
  __device__ int next_split(int tile) const {
    if (tile == 0) return 0;
    return min(num_tiles, split_begin(split_of(first_tile + tile - 1) + 1) - first_tile);
  }
};

// Finds sequences by what they and those before them add up to, 32 at a time, one a lane. All lanes
// call together, and what is sought must not decrease from call to call.
class Sequences {
 public:
  // `lengths` are those of sequence lane_id().
  __device__ Sequences(const AttentionParams& params, int tile_rows, const Lengths& lengths)
      : p_(params), tile_rows_(tile_rows), next_(lengths) {}
  __device__ Sequences(const AttentionParams& params, int tile_rows)
      : Sequences(params, tile_rows, Lengths(params, lane_id())) {}

  // The sequence of row tile `i` of all, counted once a kv head. False when there are not so many.
  __device__ bool find_row_tile(int i) { return find(i, row_tiles_); }
  // That of tile `i` of the queries that go by splits.
  __device__ bool find_tile(int i) { return find(i, tiles_); }

  int seq;                                                            // found
  Sequence sequence;                                                  // the same
  int row_tiles_before, tiles_before, queries_before, splits_before;  // in the sequences before it

 private:
  // Of the sequences before the 32, of the 32, and up to and with this lane's.
  struct Sum {
    int before = 0, all = 0, past;

    __device__ void advance(int x) {
      before += all;
      all = __reduce_add_sync(kAllLanes, x);
    }
    __device__ void scan(int x) { past = before + scan_lanes(x); }
  };

  __device__ bool find(int i, const Sum& sum) {
    bool scanned = true;
    while (i >= sum.before + sum.all) {
      if (first_seq_ + 32 >= p_.num_seqs) return false;
      first_seq_ += 32;
      mine_ = Sequence(p_, next_, first_seq_ + lane_id(), tile_rows_);
      next_ = Lengths(p_, first_seq_ + 32 + lane_id());
      row_tiles_.advance(mine_.row_tiles);
      tiles_.advance(mine_.queries * mine_.num_tiles);
      queries_.advance(mine_.queries);
      splits_.advance(mine_.queries * mine_.num_splits());
      scanned = false;
    }
    if (!scanned) {
      row_tiles_.scan(mine_.row_tiles);
      tiles_.scan(mine_.queries * mine_.num_tiles);
      queries_.scan(mine_.queries);
      splits_.scan(mine_.queries * mine_.num_splits());
    }
    const int lane = __popc(__ballot_sync(kAllLanes, sum.past <= i));
    seq = first_seq_ + lane;
    const auto from = [lane](int x) { return __shfl_sync(kAllLanes, x, lane); };
    sequence.q_begin = from(mine_.q_begin);
    sequence.q_len = from(mine_.q_len);
    sequence.seq_len = from(mine_.seq_len);
    sequence.queries = from(mine_.queries);
    sequence.first_tile = from(mine_.first_tile);
    sequence.num_tiles = from(mine_.num_tiles);
    sequence.row_tiles = from(mine_.row_tiles);
    row_tiles_before = from(row_tiles_.past) - sequence.row_tiles;
    tiles_before = from(tiles_.past) - sequence.queries * sequence.num_tiles;
    queries_before = from(queries_.past) - sequence.queries;
    splits_before = from(splits_.past) - sequence.queries * sequence.num_splits();
    return true;
  }

  const AttentionParams& p_;
  const int tile_rows_;
  int first_seq_ = -32;  // of the 32
  Sequence mine_;
  Lengths next_;  // of the 32 after them
  Sum row_tiles_, tiles_, queries_, splits_;
};

// Copies 16 keys, or values, of one kv head: where block_tables says they are. A group of lanes
// takes a row, 16 bytes a lane.
template <int kHeadDim, int kRows>
class BlockCopier {
 public:
  // Copies rows `row` + kRows * i; needs all lanes.
  __device__ BlockCopier(const AttentionParams& p, int row, int chunk)
      : p_(p), row_(row), chunk_(chunk), token_elements_(p.num_kv_heads * kHeadDim) {}

  // Of sequence `seq`; nothing but keys [first, past) is read, of the table neither.
  __device__ __forceinline__ void open(int seq, int kv_head, int first, int past) {
    table_ = p_.block_tables + seq * p_.table_stride;
    lane_offset_ = kv_head * kHeadDim + row_ * token_elements_ + chunk_ * 8;
    first_ = first;
    past_ = past;
    base_ = -32;
  }

  // Where this lane's part of keys [key, key + 16) begins; key is a multiple of 16.
  __device__ __forceinline__ int64_t offset_of(int key) {
    const int block = key >> p_.block_shift;
    if (static_cast<unsigned>(block - base_) >= 32u) {
      base_ = block;
      const int i = block + lane_id();
      const bool needed = i >= first_ >> p_.block_shift && (i << p_.block_shift) < past_;
      entry_ = needed ? __ldg(table_ + i) : 0;
    }
    const int id = __shfl_sync(kAllLanes, entry_, block - base_);
    const int within = key & ((1 << p_.block_shift) - 1);
    return static_cast<int64_t>(id) * (token_elements_ << p_.block_shift) +
           (within * token_elements_ + lane_offset_);
  }

  // What is not there becomes zeros. `place` is where the 16 rows of the first panel go.
  __device__ __forceinline__ void copy(uint32_t place, const __nv_bfloat16* cache, int64_t offset,
                                       int key) const {
    const __nv_bfloat16* x = cache + offset;
    const bool whole = key >= first_ && key + kBlockRows <= past_;
    place += chunk_ / 8 * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kBlockRows; i += kRows) {
      const int row = row_ + i, at = key + row;
      const uint32_t here = place + row * 128 + ((chunk_ % 8 ^ (row % 8)) * 16);
      if (whole) {
        copy_16_async(here, x);
      } else {
        copy_16_async(here, x, at >= first_ && at < past_);
      }
      x += kRows * token_elements_;
    }
  }

 private:
  const AttentionParams& p_;
  const int row_, chunk_, token_elements_;
  const int32_t* table_;
  int lane_offset_, first_, past_;
  int base_, entry_;  // lane l holds entry base_ + l
};

// ---- Row tiles ----------------------------------------------------------------------------------

// Consecutive rows of one kv head of a sequence, and the tiles of keys that any of them sees.
struct RowTile {
  int seq, kv_head;
  int q_begin, first_position;  // of the sequence's queries
  int first_row, last_row;
  int first_key, past_key;
  int begin, end;  // tiles

  __device__ RowTile(const AttentionParams& p, const Sequences& sequences, int i, int tile_rows,
                     int head)
      : seq(sequences.seq), kv_head(head) {
    const Sequence& sequence = sequences.sequence;
    q_begin = sequence.q_begin;
    first_position = sequence.seq_len - sequence.q_len;
    // The longest first: the last row tile sees most keys.
    first_row = (sequence.row_tiles - 1 - i) * tile_rows;
    last_row = min(first_row + tile_rows, sequence.q_len * p.group) - 1;
    first_key = first_visible(p, position_of(p, first_row));
    past_key = max(0, position_of(p, last_row) + 1);
    begin = first_key / kTileKeys;
    end = (past_key + kTileKeys - 1) / kTileKeys;
  }

  // Rows behind the last one are taken for it.
  __device__ int position_of(const AttentionParams& p, int row) const {
    return first_position + min(row, last_row) / p.group;
  }
  // Where a row lies in q or out.
  __device__ int64_t offset_of(const AttentionParams& p, int row, int64_t stride,
                               int head_dim) const {
    const int i = min(row, last_row);
    const int head = kv_head * p.group + i % p.group;
    return (q_begin + i / p.group) * stride + head * head_dim;
  }
};

// What the rows of a thread have summed up in the splits before. acc waits in shared memory, four
// floats a thread in turn.
template <int kHeadDim, int kBlocks, int kAllThreads>
class Totals {
 public:
  __device__ Totals(char* shared, int thread) : acc_(reinterpret_cast<float4*>(shared) + thread) {}

  // rows = total + rows.
  __device__ __forceinline__ void add_to(Rows<kHeadDim, kBlocks>& rows) const {
    rows.sum_lanes();
    if (empty_) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const Merge merge[2] = {{max_[b][0], rows.max[b][0]}, {max_[b][1], rows.max[b][1]}};
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float4 total = acc_[(b * (kHeadDim / 8) + n) * kAllThreads];
        float (&acc)[4] = rows.acc[b][n];
        acc[0] = merge[0](total.x, acc[0]);
        acc[1] = merge[0](total.y, acc[1]);
        acc[2] = merge[1](total.z, acc[2]);
        acc[3] = merge[1](total.w, acc[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows.sum[b][h] = merge[h](sum_[b][h], rows.sum[b][h]);
        rows.max[b][h] = merge[h].max;
      }
    }
  }

  __device__ __forceinline__ void store(const Rows<kHeadDim, kBlocks>& rows) {
    empty_ = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float (&acc)[4] = rows.acc[b][n];
        acc_[(b * (kHeadDim / 8) + n) * kAllThreads] = {acc[0], acc[1], acc[2], acc[3]};
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum_[b][h] = rows.sum[b][h];
        max_[b][h] = rows.max[b][h];
      }
    }
  }

 private:
  float4* const acc_;  // this thread's, kAllThreads apart
  bool empty_ = true;
  float max_[kBlocks][2], sum_[kBlocks][2];
};

template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const RowTile& tile,
                                           const Rows<kHeadDim, kBlocks>& rows, int warp_row) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + b * 16 + lane_id() / 4 + h * 8;
      if (row > tile.last_row) continue;
      const float inverse_sum = inverse(rows.sum[b][h]);
      auto* out =
          reinterpret_cast<uint32_t*>(p.out + tile.offset_of(p, row, p.out_stride, kHeadDim)) +
          lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        out[n * 4] = finish(rows.acc[b][n][2 * h], rows.acc[b][n][2 * h + 1], inverse_sum);
      }
    }
  }
}

template <int kHeadDim>
class RowTiles {
  using Size = Sizes<kHeadDim>;
  static constexpr int kBlocks = Size::kRowBlocks;
  static constexpr int kStages = Size::kStages;

 public:
  __device__ RowTiles(const AttentionParams& params, char* shared)
      : p_(params),
        stages_(shared_address(shared)),
        totals_(shared + kStages * 2 * Size::kTileBytes, threadIdx.x),
        copier_(params, threadIdx.x / Size::kChunks, threadIdx.x % Size::kChunks) {}

  __device__ void attend(const RowTile& item) {
    const int begin = item.begin, end = item.end, last_row = item.last_row;
    copier_.open(item.seq, item.kv_head, item.first_key, item.past_key);

    const int warp = threadIdx.x / 32, warp_row = item.first_row + warp * kBlocks * 16;
    int position[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        position[b][h] = item.position_of(p_, warp_row + b * 16 + lane_id() / 4 + h * 8);
      }
    }
    // The warp's keys are (lowest - window, highest], all of them seen by all rows up to `lowest`.
    const int lowest = item.position_of(p_, warp_row);
    const int highest =
        warp_row > last_row ? -1 : item.position_of(p_, warp_row + kBlocks * 16 - 1);

    // q comes through the stage that is filled last.
    copy_queries(item, stages_ + (kStages - 1) * 2 * Size::kTileBytes);
    commit_copies();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (begin + i < end) copy_tile(begin + i, i);
      commit_copies();
    }
    wait_copies<kStages - 1>();
    __syncthreads();
    QueryFragments<kHeadDim, kBlocks> q;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      load_queries<kHeadDim>(q[b], stages_ + (kStages - 1) * 2 * Size::kTileBytes +
                                       (warp * kBlocks + b) * 16 * Size::kRowBytes);
    }

    Rows<kHeadDim, kBlocks> rows;
    rows.reset();
    int stage = 0;
    for (int tile = begin; tile < end; ++tile) {
      wait_copies<kStages - 2>();
      __syncthreads();  // the tile is there, and everyone is done with the one before
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      if (tile + kStages - 1 < end) copy_tile(tile + kStages - 1, free_stage);
      commit_copies();
      const int base = tile * kTileKeys;
      const bool seen =
          base <= highest && (p_.window <= 0 || base + kTileKeys > lowest - p_.window + 1);
      if (seen) {
        const bool masked =
            base + kTileKeys - 1 > lowest || (p_.window > 0 && base <= highest - p_.window);
        attend_tile(rows, q, position, stages_ + stage * 2 * Size::kTileBytes, base, masked);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (split_of(tile + 1) != split_of(tile) && tile + 1 < end) {
        totals_.add_to(rows);
        totals_.store(rows);
        rows.reset();
      }
    }
    totals_.add_to(rows);
    store_rows(p_, item, rows, warp_row);
  }

 private:
  __device__ void copy_queries(const RowTile& item, uint32_t to) {
    constexpr int kRows = kThreads / Size::kChunks;  // at a time
    const int chunk = threadIdx.x % Size::kChunks;
#pragma unroll
    for (int i = 0; i < Size::kTileRows / kRows; ++i) {
      const int row = threadIdx.x / Size::kChunks + i * kRows;
      copy_16_async(
          to + row * Size::kRowBytes + ((chunk ^ (row % 8)) * 16),
          p_.q + item.offset_of(p_, item.first_row + row, p_.q_stride, kHeadDim) + chunk * 8,
          item.first_row + row <= item.last_row);
    }
  }

  __device__ void copy_tile(int tile, int stage) {
    const uint32_t to = stages_ + stage * 2 * Size::kTileBytes;
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kBlockRows) {
      const int key = tile * kTileKeys + i;
      const int64_t offset = copier_.offset_of(key);
      copier_.copy(to + i * 128, p_.k_cache, offset, key);
      copier_.copy(to + i * 128 + Size::kTileBytes, p_.v_cache, offset, key);
    }
  }

  __device__ __forceinline__ void attend_tile(Rows<kHeadDim, kBlocks>& rows,
                                              const QueryFragments<kHeadDim, kBlocks>& q,
                                              const int (&position)[kBlocks][2], uint32_t stage,
                                              int base, bool masked) {
    float s[kBlocks][kTileKeys / 8][4];
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      score_keys<kHeadDim, kBlocks>(s, i, q, stage + i * kBlockRows * 128);
    }
    Fragment4 p[kBlocks][kTileBlocks];
    if (masked) {
      softmax_step<true>(p, s, rows, position, base, p_.window, p_.scale_log2);
    } else {
      softmax_step<false>(p, s, rows, position, base, p_.window, p_.scale_log2);
    }
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      add_values<kHeadDim, kBlocks>(rows, p, i, stage + Size::kTileBytes + i * kBlockRows * 128);
    }
  }

  const AttentionParams& p_;
  const uint32_t stages_;  // [kStages][k, v][kTileKeys rows]
  Totals<kHeadDim, kBlocks, kThreads> totals_;
  BlockCopier<kHeadDim, kThreads / Size::kChunks> copier_;
};

// ---- Row tiles on wgmma -------------------------------------------------------------------------

template <int kHeadDim>
struct WgmmaSizes {
  static constexpr int kGroups = kHeadDim == 64 ? 3 : 2;  // of four warps, 64 rows each
  static constexpr int kThreads = (kGroups + 1) * 128;    // the first four warps copy
  static constexpr int kTileRows = kGroups * 64;
  static constexpr int kStages = kHeadDim == 64 ? 6 : 4;
  static constexpr int kTileBytes = kTileKeys * kHeadDim * 2;  // of k or of v
  static constexpr int kSharedBytes =
      kStages * 2 * kTileBytes + kGroups * 128 * kHeadDim / 2 * 4;  // with the totals
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "build for 90a, not 90: the launcher counts on wgmma"
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TINYVLLM_WGMMA 1

// d [64, n] += a [64, 16] b [16, n], n = 64 or 128, or = without `adds`, asynchronously. A warp
// holds 16 rows, laid out as for mma; b lies in shared memory in rows of 128 swizzled bytes: one
// for each of the n columns or, transposed, one for each of the 16.
#define TINYVLLM_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TINYVLLM_D8(i)                                                                       \
  TINYVLLM_D(i), TINYVLLM_D(i + 1), TINYVLLM_D(i + 2), TINYVLLM_D(i + 3), TINYVLLM_D(i + 4), \
      TINYVLLM_D(i + 5), TINYVLLM_D(i + 6), TINYVLLM_D(i + 7)

template <bool kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[8][4], const Fragment4& a, uint64_t b,
                                      bool adds = true) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %38, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %37; }"
      : TINYVLLM_D8(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed ? 1 : 0), "r"(+adds));
}

template <bool kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[16][4], const Fragment4& a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, "
      "1, 1, 1, %69;"
      : TINYVLLM_D8(0), TINYVLLM_D8(8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed ? 1 : 0));
}
#undef TINYVLLM_D8
#undef TINYVLLM_D

// Registers that a wgmma reads or writes: written before this, and read only after it.
template <int kColumns>
__device__ __forceinline__ void pin(float (&d)[kColumns][4]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
  }
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// b for wgmma: 128-byte swizzle, groups of 8 rows 1024 bytes apart; `panels` from one 64 columns of
// a transposed b to the next.
__device__ __forceinline__ uint64_t describe_matrix(uint32_t address, int panels) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t(panels >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Four warps copy, the others compute, 16 rows a warp.
template <int kHeadDim>
class WgmmaRowTiles {
  using Size = WgmmaSizes<kHeadDim>;
  static constexpr int kStages = Size::kStages;
  static constexpr int kChunks = Sizes<kHeadDim>::kChunks;
  static constexpr int kCopyRegisters = kHeadDim == 64 ? 32 : 40;
  static constexpr int kRegisters = kHeadDim == 64 ? 160 : 232;

 public:
  static __device__ void attend(const AttentionParams& p, char* shared) {
    __shared__ uint64_t barriers[2][kStages];  // full, empty
    Sequences sequences(p, Size::kTileRows);
    const int i = static_cast<int>(blockIdx.x) / p.num_kv_heads;
    if (!sequences.find_row_tile(i)) return;
    const RowTile tile(p, sequences, i - sequences.row_tiles_before, Size::kTileRows,
                       static_cast<int>(blockIdx.x) % p.num_kv_heads);
    const uint32_t stages = shared_address(shared);
    const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(full + stage * 8, 128);
        barrier_init(empty + stage * 8, Size::kGroups * 4);
      }
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
      copy_tiles(p, tile, stages, full, empty);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
      attend_tiles(p, tile, stages, full, empty, shared + kStages * 2 * Size::kTileBytes);
    }
  }

 private:
  static __device__ __forceinline__ void copy_tiles(const AttentionParams& p, const RowTile& tile,
                                                    uint32_t stages, uint32_t full,
                                                    uint32_t empty) {
    BlockCopier<kHeadDim, 128 / kChunks> copier(p, threadIdx.x / kChunks, threadIdx.x % kChunks);
    copier.open(tile.seq, tile.kv_head, tile.first_key, tile.past_key);
    const int num_tiles = tile.end - tile.begin;
    for (int i = 0; i < num_tiles; ++i) {
      const int stage = i % kStages;
      if (i >= kStages) barrier_wait(empty + stage * 8, (i / kStages + 1) % 2);
      const uint32_t to = stages + stage * 2 * Size::kTileBytes;
#pragma unroll
      for (int row = 0; row < kTileKeys; row += kBlockRows) {
        const int key = (tile.begin + i) * kTileKeys + row;
        const int64_t offset = copier.offset_of(key);
        copier.copy(to + row * 128, p.k_cache, offset, key);
        copier.copy(to + row * 128 + Size::kTileBytes, p.v_cache, offset, key);
      }
      // Arrives once this thread's copies have.
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + stage * 8)
                   : "memory");
    }
    wait_copies<0>();  // no thread ends before its copies
  }

  static __device__ __forceinline__ void attend_tiles(const AttentionParams& p, const RowTile& tile,
                                                      uint32_t stages, uint32_t full,
                                                      uint32_t empty, char* totals) {
    const int thread = static_cast<int>(threadIdx.x) - 128, lane = lane_id();
    const int warp_row = tile.first_row + thread / 32 * 16;
    int position[1][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) position[0][h] = tile.position_of(p, warp_row + lane / 4 + h * 8);
    const int lowest = tile.position_of(p, warp_row);
    const int highest = tile.position_of(p, warp_row + 15);
    // The tiles that some of the 64 rows sees.
    const int group_row = tile.first_row + thread / 128 * 64;
    int begin = tile.end, end = tile.end;
    if (group_row <= tile.last_row) {
      begin = first_visible(p, tile.position_of(p, group_row)) / kTileKeys;
      end = tile.position_of(p, group_row + 63) / kTileKeys + 1;
      if (tile.position_of(p, group_row + 63) < 0) end = begin;
    }
    begin = __shfl_sync(kAllLanes, begin, 0);  // the same in all lanes, for the compiler to see
    end = __shfl_sync(kAllLanes, end, 0);
    QueryFragments<kHeadDim, 1> q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + lane / 4 + h * 8;
      const auto* pairs =
          reinterpret_cast<const uint32_t*>(p.q + tile.offset_of(p, row, p.q_stride, kHeadDim)) +
          lane % 4;
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        q[0][k][h] = pairs[k * 8];
        q[0][k][h + 2] = pairs[k * 8 + 4];
      }
    }
    Rows<kHeadDim, 1> rows;
    rows.reset();
    Totals<kHeadDim, 1, Size::kGroups * 128> total(totals, thread);
    Ring ring{full, empty};
    const auto skip = [&](int tiles) {
      for (int i = 0; i < tiles; ++i) {
        ring.wait();
        ring.free();
      }
    };
    skip((begin < end ? begin : tile.end) - tile.begin);
    if (begin < end) {
      float s[1][kTileKeys / 8][4] = {};
      ring.wait();
      score(s[0], q[0], stages + ring.stage * 2 * Size::kTileBytes);
      wgmma_wait();
      pin(s[0]);
      for (int i = begin; i < end; ++i) {
        Fragment4 probabilities[1][kTileBlocks];
        const int base = i * kTileKeys;
        if (base + kTileKeys - 1 > lowest || (p.window > 0 && base <= highest - p.window)) {
          softmax_step<true>(probabilities, s, rows, position, base, p.window, p.scale_log2);
        } else {
          softmax_step<false>(probabilities, s, rows, position, base, p.window, p.scale_log2);
        }
        // Without a gap: this tile's values, then the next one's keys; after the last tile its own
        // once more, since a branch here would make wgmma wait for each other.
        Ring next = ring;
        if (i + 1 < end) next.advance();
        next.wait();
        pin(rows.acc[0]);
        wgmma_fence();
        const uint32_t values = stages + (ring.stage * 2 + 1) * Size::kTileBytes;
#pragma unroll
        for (int j = 0; j < kTileBlocks; ++j) {
          wgmma<true>(rows.acc[0], probabilities[0][j],
                      describe_matrix(values + j * kBlockRows * 128, kPanelBytes));
        }
        score(s[0], q[0], stages + next.stage * 2 * Size::kTileBytes);
        wgmma_wait();
        pin(rows.acc[0]);
        pin(s[0]);
        ring.free();
        if (i + 1 < end && split_of(i + 1) != split_of(i)) {
          total.add_to(rows);
          total.store(rows);
          rows.reset();
        }
      }
      skip(tile.end - end);
    }
    total.add_to(rows);
    store_rows<kHeadDim, 1>(p, tile, rows, warp_row);
  }

  // Where a warp is in the ring of tiles.
  struct Ring {
    uint32_t full, empty;
    int stage = 0, phase = 0;

    __device__ __forceinline__ void wait() const {
      barrier_wait(full + stage * 8, phase);
      // wgmma reads through another proxy than the copies wrote through. The fence is here, since
      // in the threads that copy it would wait for the copies on their way.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __device__ __forceinline__ void advance() {
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (stage == 0) phase ^= 1;
    }
    __device__ __forceinline__ void free() {
      if (lane_id() == 0) barrier_arrive(empty + stage * 8);
      advance();
    }
  };

  // s = q k^T of a tile.
  static __device__ __forceinline__ void score(float (&s)[kTileKeys / 8][4],
                                               const Fragment4 (&q)[kHeadDim / 16], uint32_t keys) {
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      wgmma<false>(s, q[k], describe_matrix(keys + k / 4 * kPanelBytes + k % 4 * 32, 16), k > 0);
    }
    wgmma_commit();
  }
};

#else
#define TINYVLLM_WGMMA 0
#endif

// ---- Splits -------------------------------------------------------------------------------------

constexpr int kMaxSplits = 0xffff;  // that a counter counts
constexpr int kFewTiles = 8;        // of one sequence: the next kernel may start at once

// How the queries' splits are divided over groups of blocks: group g takes the splits that begin in
// its range of the tiles of all queries.
struct Division {
  int tiles, groups;
  bool divided;  // else ranges end with queries

  // All threads together; sums is shared memory.
  template <int kAllWarps>
  __device__ Division(const AttentionParams& p, int (&sums)[kAllWarps][4]) {
    int thread_tiles = 0, thread_splits = 0, thread_queries = 0;
#pragma unroll 1
    for (int s = threadIdx.x; s < p.num_seqs; s += kAllWarps * 32) {
      const Sequence sequence(p, Lengths(p, s), s, 1);
      thread_tiles += sequence.queries * sequence.num_tiles;
      thread_splits += sequence.queries * sequence.num_splits();
      thread_queries += sequence.queries;
    }
    tiles = __reduce_add_sync(kAllLanes, thread_tiles);
    int splits = __reduce_add_sync(kAllLanes, thread_splits);
    int queries = __reduce_add_sync(kAllLanes, thread_queries);
    if (lane_id() == 0) {
      *reinterpret_cast<int4*>(sums[threadIdx.x / 32]) = {tiles, splits, queries, 0};
    }
    __syncthreads();
    tiles = splits = queries = 0;
#pragma unroll
    for (int warp = 0; warp < kAllWarps; ++warp) {
      const int4 sum = *reinterpret_cast<const int4*>(sums[warp]);
      tiles += sum.x;
      splits += sum.y;
      queries += sum.z;
    }
    groups = max(1, min(static_cast<int>(gridDim.z), splits));
    divided = splits <= kMaxSplits && static_cast<int64_t>(splits) * p.head_units <= p.max_slots &&
              static_cast<int64_t>(queries) * p.head_units <= p.max_counters;
  }

  // tiles * group / groups
  __device__ int begin_of(int group) const {
    const unsigned whole = static_cast<unsigned>(tiles) / groups;
    const unsigned rest = static_cast<unsigned>(tiles) % groups;
    return static_cast<int>(whole * group + rest * group / groups);
  }
};

// Up to 16 rows: query heads of one token that share a kv head.
struct HeadUnit {
  int index, kv_head, first_head, rows;

  // The grid is [groups, num_kv_heads, units of a kv head].
  __device__ explicit HeadUnit(const AttentionParams& p) : kv_head(blockIdx.y) {
    const int first_row = static_cast<int>(blockIdx.x) * kBlockRows;
    index = kv_head * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    first_head = kv_head * p.group + first_row;
    rows = min(kBlockRows, p.group - first_row);
  }
};

// Consecutive splits of one query. Lies beside the slot with its q.
struct alignas(16) Run {
  int token;  // -1: no run, the end of the stream
  int position;
  int begin, end;             // keys that it sees; begin is that of a tile
  int first_new;              // the first key that this step stored
  int first_split;            // counted from the first key of the sequence
  int before, splits, total;  // splits of the query: before the run, in it, all
  int query, slot;            // of those that go by splits; slot of the query's first split
  bool last;                  // surely the last of the block's stream

  __device__ bool whole() const { return splits == total; }
};

// Finds the runs of a block.
class RunFinder {
 public:
  __device__ RunFinder(const AttentionParams& params, const Lengths& lengths,
                       const Division& division, int group, int unit)
      : p_(params), divided_(division.divided), unit_(unit), sequences_(params, 1, lengths) {
    if (group >= division.groups) return;
    next_tile_ = division.begin_of(group);
    past_tile_ = division.begin_of(group + 1);
  }

  int seq;  // of the run found

  // False at the end of the range. All lanes together.
  __device__ __forceinline__ bool next(Run& run) {
    while (next_tile_ < past_tile_ && sequences_.find_tile(next_tile_)) {
      const Sequence& sequence = sequences_.sequence;
      const int num_tiles = sequence.num_tiles, within = next_tile_ - sequences_.tiles_before;
      const int query = sequence.queries > 1 ? within / num_tiles : 0;
      const int origin = sequences_.tiles_before + query * num_tiles;
      int tile = sequence.next_split(next_tile_ - origin);
      int past = sequence.next_split(min(num_tiles, past_tile_ - origin));
      if (!divided_) {
        if (tile > 0) tile = num_tiles;
        past = num_tiles;
      }
      next_tile_ = origin + max(tile, past);
      if (tile >= past) continue;

      const int first_tile = sequence.first_tile;
      seq = sequences_.seq;
      run.token = sequence.q_begin + query;
      run.first_new = sequence.seq_len - sequence.q_len;
      run.position = run.first_new + query;
      run.begin = max((first_tile + tile) * kTileKeys,
                      first_visible(p_, run.position) / kTileKeys * kTileKeys);
      run.end = min((first_tile + past) * kTileKeys, run.position + 1);
      run.first_split = split_of(first_tile + tile);
      run.total = sequence.num_splits();
      run.before = sequence.splits_before(tile);
      run.splits = sequence.splits_before(past) - run.before;
      run.query = sequences_.queries_before + query;
      run.slot = (sequences_.splits_before + query * run.total) * p_.head_units + unit_;
      // Where this is false the range has tiles left, but perhaps no further run.
      run.last = next_tile_ >= past_tile_;
      return true;
    }
    return false;
  }

 private:
  const AttentionParams& p_;
  const bool divided_;
  const int unit_;
  int next_tile_ = 0, past_tile_ = 0;  // where the next run may begin
  Sequences sequences_;
};

// The ring through which the warp that copies feeds those that compute. A slot is full when its
// copies are there, and empty again when the four warps say so.
template <int kRing>
struct SplitRing {
  Run runs[kRing];  // of the slots with which a run begins
  uint64_t full[kRing], empty[kRing];
  bool has_work;

  __device__ __forceinline__ uint32_t full_of(int slot) const {
    return shared_address(full + slot);
  }
  __device__ __forceinline__ uint32_t empty_of(int slot) const {
    return shared_address(empty + slot);
  }

  // One thread, before all others.
  __device__ __forceinline__ void open(const SplitParams& params) {
#if TINYVLLM_BULK_COPY
    asm volatile("prefetch.tensormap [%0];" ::"l"(&params.k_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&params.v_map) : "memory");
#endif
    for (int i = 0; i < kRing; ++i) {
      barrier_init(full_of(i), 1);
      barrier_init(empty_of(i), kWarps);
    }
    fence_barrier_init();
  }

  // All threads of the block: false when there is nothing for it to do, else what kernels before
  // this one stored may be read from here on.
  __device__ __forceinline__ bool starts(const AttentionParams& p) const {
    asm volatile("bar.sync 2, %0;" ::"n"((kWarps + 1) * 32) : "memory");
    if (!has_work) return false;
    // Row tiles, which let this kernel start, have waited for all before them, and nothing here
    // depends on them.
    if (p.only_splits) wait_for_previous_kernels();
    return true;
  }
};

// Copies what a sequence's block table says, 16 keys at a time. The whole warp calls this.
template <int kHeadDim>
class KeyCopier {
  static constexpr int kTileBytes = kTileKeys * kHeadDim * 2;

 public:
  __device__ KeyCopier(const SplitParams& params, const HeadUnit& unit)
      : params_(params), p_(params.attention), column_(unit.kv_head * kHeadDim) {
#if TINYVLLM_BULK_COPY
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once_));
#endif
  }

  // Of sequence `seq` keys [first, past), from `begin` on.
  __device__ __forceinline__ void open(int seq, int first, int begin, int past) {
    table_ = p_.block_tables + seq * p_.table_stride;
    first_block_ = first >> p_.block_shift;
    past_block_ = (past + (1 << p_.block_shift) - 1) >> p_.block_shift;
    base_ = begin >> p_.block_shift;
    entry_ = entry_of(base_ + lane_id());
    next_entry_ = entry_of(base_ + 32 + lane_id());
  }

  // Blocks [from, to) of 16 keys of the tile that begins with key `tile`, k and v. Only within the
  // first 32 entries of the table may a tile lie before the one asked for last.
  __device__ __forceinline__ void copy(uint32_t slot, int tile, int from, int to, uint32_t full) {
    if ((tile >> p_.block_shift) - base_ >= 32) {
      base_ += 32;
      entry_ = next_entry_;
      next_entry_ = entry_of(base_ + 32 + lane_id());
    }
    int rows[kTileBlocks];  // of the caches
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      const int key = tile + i * kBlockRows;
      const int id = __shfl_sync(kAllLanes, entry_, (key >> p_.block_shift) - base_);
      rows[i] = (id << p_.block_shift) + (key & ((1 << p_.block_shift) - 1));
    }
#if TINYVLLM_BULK_COPY
    if (elect_lane()) {
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) {
        if (i < from || i >= to) continue;
#pragma unroll
        for (int panel = 0; panel < kHeadDim / 64; ++panel) {
          const uint32_t place = slot + panel * kPanelBytes + i * kBlockRows * 128;
          copy_box(place, params_.k_map, column_ + panel * 64, rows[i], full);
          copy_box(place + kTileBytes, params_.v_map, column_ + panel * 64, rows[i], full);
        }
      }
    }
    __syncwarp();
#else
    constexpr int kChunks = Sizes<kHeadDim>::kChunks, kRows = 32 / kChunks;
    const int chunk = lane_id() % kChunks;
    const int64_t stride = p_.num_kv_heads * kHeadDim;
    slot += chunk / 8 * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      if (i < from || i >= to) continue;
      int64_t offset = (rows[i] + lane_id() / kChunks) * stride + column_ + chunk * 8;
#pragma unroll
      for (int j = 0; j < kBlockRows; j += kRows) {
        const int at = lane_id() / kChunks + j;
        const uint32_t place = slot + (i * kBlockRows + at) * 128 + (chunk % 8 ^ (at % 8)) * 16;
        copy_16_async(place, p_.k_cache + offset);
        copy_16_async(place + kTileBytes, p_.v_cache + offset);
        offset += kRows * stride;
      }
    }
#endif
  }

 private:
  __device__ __forceinline__ int entry_of(int i) const {
    return i >= first_block_ && i < past_block_ ? __ldg(table_ + i) : 0;
  }

#if TINYVLLM_BULK_COPY
  // True in one lane of the warp: the compiler knows that, and asks without a loop over lanes.
  static __device__ __forceinline__ bool elect_lane() {
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
                 : "=r"(elected));
    return elected != 0;
  }

  __device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int column, int row,
                                           uint32_t barrier) const {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(read_once_)
        : "memory");
  }

  uint64_t read_once_;  // a hint to L2
#endif

  const SplitParams& params_;
  const AttentionParams& p_;
  const int column_;
  const int32_t* table_;
  int first_block_, past_block_;
  int base_, entry_, next_entry_;  // lane l holds entries base_ + l and base_ + 32 + l
};

// The warp that writes the stream of a block into its ring: the k and v of each tile of its runs (a
// run without a key has one tile, all of it hidden), and with the first of them the run's q.
template <int kHeadDim, int kRing>
class SplitProducer {
  using Size = SplitSizes<kHeadDim, kRing>;
  static_assert(kRing * kTileBlocks <= 32, "the old keys of a ring lie in 32 entries of a table");

 public:
  __device__ SplitProducer(const SplitParams& params, const HeadUnit& unit, uint32_t slots,
                           SplitRing<kRing>& ring)
      : p_(params.attention), unit_(unit), slots_(slots), ring_(ring), copier_(params, unit) {}

  // False when there is nothing to do for this block.
  __device__ __forceinline__ bool produce(const Division& division, const Lengths& lengths) {
    const int lane = lane_id();
    const int group = blockIdx.z;
    RunFinder finder(p_, lengths, division, group, unit_.index);
    Run run;
    int slot = 0, parity = 1, prefetched = 0;
    bool ended = false;  // and the readers know
    for (bool first = true; !ended; first = false) {
      const bool found = finder.next(run);
      const int begin = run.begin, end = run.end, first_new = run.first_new;
      const int first_key = first_visible(p_, run.position);
      if (found) copier_.open(finder.seq, first_key, begin, end);
      if (first) {
        // What is older than this step's kernels: of the first run the keys that were there before.
        if (found) {
          for (; prefetched < kRing; ++prefetched) {
            const int tile = begin + prefetched * kTileKeys;
            if (tile >= end) break;
            const int past = min(past_block(tile, end), old_block(tile, first_new));
            copier_.copy(slots_ + prefetched * Size::kSlotBytes, tile, first_block(tile, first_key),
                         past, ring_.full_of(prefetched));
          }
        }
        if (lane == 0) ring_.has_work = found || group == 0;
        if (!ring_.starts(p_)) return false;
        let_next_kernel_start();
      }
      if (!found) break;
      int tile = begin;
      do {
        const uint32_t place = slots_ + slot * Size::kSlotBytes, full = ring_.full_of(slot);
        barrier_wait(ring_.empty_of(slot), parity);
        const int from = first_block(tile, first_key), past = past_block(tile, end);
        int next = from;
        if (prefetched > 0) {
          next = max(from, old_block(tile, first_new));
          --prefetched;
        }
        copier_.copy(place, tile, next, past, full);
        if (tile == begin) {
          copy_queries(place + 2 * Size::kTileBytes, run.token);
          if (lane == 0) ring_.runs[slot] = run;
          arrive_with_copies(full);
        } else if (!TINYVLLM_BULK_COPY) {
          arrive_with_copies(full);
        }
        __syncwarp();
        if (lane == 0) {
          if (TINYVLLM_BULK_COPY) {
            barrier_expect(full, max(0, past - from) * (2 * kBlockRows * kHeadDim * 2));
          } else {
            barrier_arrive(full);
          }
        }
        slot = slot + 1 == kRing ? 0 : slot + 1;
        if (slot == 0) parity ^= 1;
        tile += kTileKeys;
      } while (tile < end);
      ended = run.last;
    }
    if (!ended) {
      barrier_wait(ring_.empty_of(slot), parity);
      if (lane == 0) {
        ring_.runs[slot].token = -1;
        barrier_arrive(ring_.full_of(slot));
      }
    }
    wait_copies<0>();  // no thread ends before its copies
    return true;
  }

 private:
  // Of the tile's blocks of 16 keys: the first with a key that is seen, the one after the last, and
  // the first with a key that this step stored.
  static __device__ __forceinline__ int first_block(int tile, int first_key) {
    return max(0, first_key - tile) / kBlockRows;
  }
  static __device__ __forceinline__ int past_block(int tile, int end) {
    return min(kTileBlocks, (end - tile + kBlockRows - 1) / kBlockRows);
  }
  static __device__ __forceinline__ int old_block(int tile, int first_new) {
    return max(0, first_new - tile) / kBlockRows;
  }

  // The barrier counts this lane's copies as one arrival more, once they are there.
  static __device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(barrier) : "memory");
  }

  __device__ __forceinline__ void copy_queries(uint32_t to, int token) const {
    constexpr int kChunks = Sizes<kHeadDim>::kChunks, kRows = 32 / kChunks;
    const int chunk = lane_id() % kChunks;
    const __nv_bfloat16* q = p_.q + token * p_.q_stride + unit_.first_head * kHeadDim + chunk * 8;
#pragma unroll
    for (int i = 0; i < kBlockRows; i += kRows) {
      const int row = lane_id() / kChunks + i;
      copy_16_async(to + row * kHeadDim * 2 + ((chunk ^ (row % 8)) * 16), q + row * kHeadDim,
                    row < unit_.rows);
    }
  }

  const AttentionParams& p_;
  const HeadUnit& unit_;
  const uint32_t slots_;
  SplitRing<kRing>& ring_;
  KeyCopier<kHeadDim> copier_;
};

// A query of which a block did some splits. There are two at most: where its range begins and where
// it ends.
struct Divided {
  int token, slot, query, splits, total;
  int first_splits;  // in the first part, if that is this block's; 0. Then those of the block that
                     // did it, if this one merges; 0
};

// What the warps of a block tell each other.
template <int kHeadDim, int kHalves, int kRing>
struct SplitShared {
  SplitRing<kRing> ring;
  float max[kBlockRows][kWarps];        // of a tile: those of the 16 keys of each warp
  float sum[kWarps][kHalves][32];       // the same, of each lane
  uint32_t p[kWarps][32][2 * kHalves];  // fragments of the a side
  alignas(16) int sums[kWarps + 1][4];  // of Division
  Divided divided[2];
};

template <int kHeadDim, int kHalves, int kRing>
class Splits {
  using Size = SplitSizes<kHeadDim, kRing>;
  using Shared = SplitShared<kHeadDim, kHalves, kRing>;
  static constexpr int kColumns = Size::kColumns;

 public:
  __device__ Splits(const AttentionParams& params, const HeadUnit& unit, uint32_t slots,
                    Shared& shared)
      : p_(params), unit_(unit), slots_(slots), warp_(threadIdx.x / 32), shared_(shared) {}

  __device__ void attend() {
    for (;;) {
      wait_for_slot();
      const Run run = shared_.ring.runs[slot_];
      if (run.token < 0) break;
      attend(run);
      if (run.last) break;
    }
    merge_divided();
  }

 private:
  // The rows of a warp's columns. max and sum are those of whole rows, in every warp alike.
  struct Part {
    float max[kHalves], sum[kHalves];
    float acc[kColumns / 8][4];

    __device__ __forceinline__ void reset() {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        max[h] = kNone;
        sum[h] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
      }
    }
  };

  __device__ __forceinline__ void wait_for_slot() {
    barrier_wait(shared_.ring.full_of(slot_), parity_);
  }

  __device__ __forceinline__ void free_slot() {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(shared_.ring.empty_of(slot_));
    slot_ = slot_ + 1 == kRing ? 0 : slot_ + 1;
    if (slot_ == 0) parity_ ^= 1;
  }

  // Of the warps that compute.
  __device__ __forceinline__ void sync_warps() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  // The slot of the run's first tile has arrived.
  __device__ void attend(const Run& run) {
    Fragment4 q[kHeadDim / 16];
    load_queries<kHeadDim>(q, slots_ + slot_ * Size::kSlotBytes + 2 * Size::kTileBytes);
    if (run.begin >= run.end) free_slot();  // nothing is seen, nothing was copied
    Part part, total;
    total.reset();
    for (int i = 0; i < run.splits; ++i) {
      const int split = run.first_split + i;
      const int end = min(run.end, split_begin(split + 1) * kTileKeys);
      part.reset();
      for (int base = max(run.begin, split_begin(split) * kTileKeys); base < end;
           base += kTileKeys) {
        if (base > run.begin) wait_for_slot();
        attend_tile(part, q, run.position, base, end, slots_ + slot_ * Size::kSlotBytes);
        free_slot();
      }
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        part.sum[h] += __shfl_xor_sync(kAllLanes, part.sum[h], 1);
        part.sum[h] += __shfl_xor_sync(kAllLanes, part.sum[h], 2);
      }
      if (run.before > 0) {
        store_part(run.slot + (run.before + i) * p_.head_units, part);
      } else {
        merge_into(total, part);
      }
    }
    if (run.whole()) {
      store_rows(run.token, total);
      return;
    }
    if (run.before == 0) store_part(run.slot, total);
    const Divided divided{run.token,  run.slot,  run.query,
                          run.splits, run.total, run.before == 0 ? run.splits : 0};
    if (threadIdx.x == 0) shared_.divided[num_divided_] = divided;
    ++num_divided_;
  }

  // What lies in the places of values that are not seen may be NaN, and 0 * NaN is no zero.
  __device__ void hide_values(uint32_t values, int base, int position) {
    constexpr int kRows = kThreads / 8;
    const int before = p_.window > 0 ? position - p_.window : -1;
    for (int row = threadIdx.x / 8; row < kTileKeys; row += kRows) {
      if (base + row <= position && base + row > before) continue;
#pragma unroll
      for (int panel = 0; panel < kHeadDim / 64; ++panel) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         values + panel * kPanelBytes + row * 128 + threadIdx.x % 8 * 16),
                     "r"(0)
                     : "memory");
      }
    }
#if TINYVLLM_BULK_COPY
    // The engine, which writes here next, must not be overtaken.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }

  __device__ __forceinline__ void attend_tile(Part& rows, const Fragment4 (&q)[kHeadDim / 16],
                                              int position, int base, int end, uint32_t slot) {
    // Each warp its 16 keys. What lies behind the last key is hidden by the mask, whatever it is.
    const int lane = lane_id();
    float s[1][kTileKeys / 8][4];
    {
      const Fragment4(&queries)[1][kHeadDim / 16] =
          reinterpret_cast<const Fragment4(&)[1][kHeadDim / 16]>(q);
      score_keys<kHeadDim, 1>(s, 0, queries, slot + warp_ * kBlockRows * 128);
    }
    if (base + kTileKeys > end || (p_.window > 0 && base <= position - p_.window)) {
      hide_values(slot + Size::kTileBytes, base, position);
      const int first = base + warp_ * kBlockRows;
      const int last = position - first - lane % 4 * 2;
      const int before = p_.window > 0 ? last - p_.window : -kTileKeys - 1;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = 8 * n + i % 2;
          if (key > last || key <= before) s[0][n][i] = kNone;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float largest = fmaxf(fmaxf(s[0][0][2 * h], s[0][0][2 * h + 1]),
                            fmaxf(s[0][1][2 * h], s[0][1][2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      if (lane % 4 == 0) shared_.max[lane / 4 + 8 * h][warp_] = largest;
    }
    sync_warps();
    float keep[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const float4 m = *reinterpret_cast<const float4*>(shared_.max[lane / 4 + 8 * h]);
      const float largest = fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w));
      const float max = fmaxf(rows.max[h], __fmul_rn(largest, p_.scale_log2));
      const float origin = max == kNone ? 0.0f : max;
      keep[h] = exp2_approx(rows.max[h] - origin);
      rows.max[h] = max;
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = exp2_approx(__fmaf_rn(s[0][c / 2][2 * h + c % 2], p_.scale_log2, -origin));
      }
      shared_.p[warp_][lane][h] = pack_bf16(x[0], x[1]);
      shared_.p[warp_][lane][h + kHalves] = pack_bf16(x[2], x[3]);
      shared_.sum[warp_][h][lane] = sum_block(x);
    }
    sync_warps();
    bool shrinks = false;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float sums[kTileBlocks];
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) sums[i] = shared_.sum[i][h][lane];
      rows.sum[h] = __fmaf_rn(rows.sum[h], keep[h], sum_tile(sums));
      shrinks |= keep[h] != 1.0f;
    }
    // All 64 keys, each warp its columns. Where no keys were copied there are zeros now.
    const int row = lane % 16;
    const int chunk = warp_ * (kColumns / 8) % 8 + lane / 16;
    const uint32_t values =
        slot + Size::kTileBytes + warp_ * kColumns / 64 * kPanelBytes + row * 128;
    Fragment4 p[kTileBlocks], v[kTileBlocks][kColumns / 16];
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[i][h] = h < kHalves ? shared_.p[i][lane][h] : 0;
        p[i][h + 2] = h < kHalves ? shared_.p[i][lane][h + kHalves] : 0;
      }
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d) {
        load_matrices_transposed(
            v[i][d], values + i * kBlockRows * 128 + (((chunk + 2 * d) ^ (row % 8)) * 16));
      }
    }
    if (__any_sync(kAllLanes, shrinks)) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
          rows.acc[n][i] = __fmul_rn(rows.acc[n][i], keep[i / 2]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d) {
        multiply_add(rows.acc[2 * d], p[i], v[i][d][0], v[i][d][1]);
        multiply_add(rows.acc[2 * d + 1], p[i], v[i][d][2], v[i][d][3]);
      }
    }
  }

  __device__ __forceinline__ void merge_into(Part& total, const Part& part) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const Merge merge(total.max[h], part.max[h]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          total.acc[n][i] = merge(total.acc[n][i], part.acc[n][i]);
        }
      }
      total.sum[h] = merge(total.sum[h], part.sum[h]);
      total.max[h] = merge.max;
    }
  }

  __device__ __forceinline__ void store_rows(int token, const Part& rows) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane_id() / 4 + h * 8;
      if (row >= unit_.rows) continue;
      const float inverse_sum = inverse(rows.sum[h]);
      auto* out =
          reinterpret_cast<uint32_t*>(p_.out + token * p_.out_stride +
                                      (unit_.first_head + row) * kHeadDim + warp_ * kColumns) +
          lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        out[n * 4] = finish(rows.acc[n][2 * h], rows.acc[n][2 * h + 1], inverse_sum);
      }
    }
  }

  __device__ __forceinline__ void store_part(int slot, const Part& rows) {
    float* part = p_.parts + static_cast<int64_t>(slot) * p_.part_floats;
    const int part_rows = min(p_.group, kBlockRows);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane_id() / 4 + h * 8;
      if (row >= unit_.rows) continue;
      auto* acc =
          reinterpret_cast<float2*>(part + row * kHeadDim + warp_ * kColumns) + lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        acc[n * 4] = {rows.acc[n][2 * h], rows.acc[n][2 * h + 1]};
      }
      if (warp_ == 0 && lane_id() % 4 == 0) {
        reinterpret_cast<float2*>(part + part_rows * kHeadDim)[row] = {rows.max[h], rows.sum[h]};
      }
    }
  }

  // Whoever brings the last splits of a query merges them. Only here: where the memory is busy a
  // fence takes long.
  __device__ __forceinline__ void merge_divided() {
    if (num_divided_ == 0) return;
    sync_warps();
    if (static_cast<int>(threadIdx.x) < num_divided_) {
      Divided& query = shared_.divided[threadIdx.x];
      uint32_t* done = p_.counters + query.query * p_.head_units + unit_.index;
      const uint32_t mine = query.splits + (query.first_splits << 16);
      const uint32_t all = add_in_order(done, mine) + mine;
      const bool last = static_cast<int>(all & 0xffff) == query.total;
      if (last) *done = 0;
      query.first_splits = last ? static_cast<int>(all >> 16) : 0;
    }
    sync_warps();
#pragma unroll 1
    for (int i = 0; i < num_divided_; ++i) {
      if (shared_.divided[i].first_splits > 0) merge_parts(shared_.divided[i]);
    }
  }

  // An atomic addition behind the stores of this block and before its loads of what others stored.
  static __device__ __forceinline__ uint32_t add_in_order(uint32_t* to, uint32_t x) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(to), "r"(x)
                 : "memory");
    return before;
  }

  // Four columns a thread.
  __device__ void merge_parts(const Divided& query) {
    // Parts on their way: a small ring's kernel has few registers, and less code to fetch.
    constexpr int kAhead = kRing == kSmallRing<kHeadDim> ? 8 : 16;
    const int64_t stride = static_cast<int64_t>(p_.head_units) * p_.part_floats;
    const float* parts = p_.parts + static_cast<int64_t>(query.slot) * p_.part_floats;
    const float* max_sums = parts + min(p_.group, kBlockRows) * kHeadDim;
    const int first_splits = query.first_splits, num_parts = query.total - first_splits + 1;
    for (int i = threadIdx.x * 4; i < unit_.rows * kHeadDim; i += kThreads * 4) {
      const int row = i / kHeadDim, column = i % kHeadDim;
      float4 total{};
      float total_max = kNone, total_sum = 0.0f;
      for (int first = 0; first < num_parts; first += kAhead) {
        float4 part[kAhead];
        float2 max_sum[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          part[j] = {};
          max_sum[j] = {kNone, 0.0f};  // merging this changes nothing
          if (first + j < num_parts) {
            const int split = first + j == 0 ? 0 : first_splits + first + j - 1;
            part[j] = __ldcg(reinterpret_cast<const float4*>(parts + split * stride + i));
            max_sum[j] =
                __ldcg(reinterpret_cast<const float2*>(max_sums + split * stride + row * 2));
          }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const Merge merge(total_max, max_sum[j].x);
          total = {merge(total.x, part[j].x), merge(total.y, part[j].y), merge(total.z, part[j].z),
                   merge(total.w, part[j].w)};
          total_sum = merge(total_sum, max_sum[j].y);
          total_max = merge.max;
        }
      }
      const float inverse_sum = inverse(total_sum);
      auto* out =
          p_.out + query.token * p_.out_stride + (unit_.first_head + row) * kHeadDim + column;
      *reinterpret_cast<uint2*>(out) = {finish(total.x, total.y, inverse_sum),
                                        finish(total.z, total.w, inverse_sum)};
    }
  }

  const AttentionParams& p_;
  const HeadUnit& unit_;
  const uint32_t slots_;
  const int warp_;
  Shared& shared_;
  int slot_ = 0, parity_ = 0, num_divided_ = 0;
};

// ---- Kernels and launcher -----------------------------------------------------------------------

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    attend_row_tiles_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(1024) char shared[];
  wait_for_previous_kernels();
  let_next_kernel_start();
  constexpr int kTileRows = Sizes<kHeadDim>::kTileRows;
  Sequences sequences(p, kTileRows);
  const int i = static_cast<int>(blockIdx.x) / p.num_kv_heads;
  if (!sequences.find_row_tile(i)) return;
  const RowTile tile(p, sequences, i - sequences.row_tiles_before, kTileRows,
                     static_cast<int>(blockIdx.x) % p.num_kv_heads);
  RowTiles<kHeadDim>(p, shared).attend(tile);
}

template <int kHeadDim>
__global__ void __launch_bounds__(WgmmaSizes<kHeadDim>::kThreads, 1)
    attend_row_tiles_wgmma_kernel(const __grid_constant__ AttentionParams p) {
#if TINYVLLM_WGMMA
  extern __shared__ __align__(1024) char shared[];
  wait_for_previous_kernels();
  let_next_kernel_start();
  WgmmaRowTiles<kHeadDim>::attend(p, shared);
#endif
}

template <int kHeadDim, int kHalves, int kRing>
__global__ void __launch_bounds__(SplitSizes<kHeadDim, kRing>::kThreads,
                                  SplitSizes<kHeadDim, kRing>::kBlocksPerSM)
    attend_splits_kernel(const __grid_constant__ SplitParams params) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ SplitShared<kHeadDim, kHalves, kRing> told;
  const AttentionParams& p = params.attention;
  const HeadUnit unit(p);
  if (threadIdx.x == kThreads) told.ring.open(params);
  const Lengths lengths = Lengths::load_now(p, lane_id());  // for the warp that copies
  const Division division(p, told.sums);
  // With one short sequence most multiprocessors are free for the weights of the next kernel.
  if (p.num_seqs == 1 && division.tiles <= kFewTiles) let_next_kernel_start();
  // A block without work ends at once and makes room for the next kernel; group 0 stays.
  if (threadIdx.x >= kThreads) {
    if (!SplitProducer<kHeadDim, kRing>(params, unit, shared_address(shared), told.ring)
             .produce(division, lengths)) {
      return;
    }
  } else {
    if (!told.ring.starts(p)) return;
    Splits<kHeadDim, kHalves, kRing>(p, unit, shared_address(shared), told).attend();
  }
  wait_for_previous_kernels();  // who waits for this kernel waits for the row tiles, too
}

bool has_wgmma() { return compute_capability_major() == 9; }

template <int kHeadDim, int kHalves, int kRing>
void launch_splits(const SplitParams& params, int64_t max_groups, Stream stream) {
  using Size = SplitSizes<kHeadDim, kRing>;
  const AttentionParams& p = params.attention;
  // For one sequence fewer blocks: those without work delay the next kernel.
  const bool is_alone = p.num_seqs == 1 && kRing == kSmallRing<kHeadDim>;
  const int blocks_per_sm = is_alone ? 1 : Size::kBlocksPerSM;
  const int64_t groups =
      std::min<int64_t>(max_groups, blocks_per_sm * num_multiprocessors() / p.head_units);
  const dim3 grid(static_cast<unsigned>(p.head_units / p.num_kv_heads),
                  static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(std::max<int64_t>(1, groups)));
  launch_early("paged_attention", attend_splits_kernel<kHeadDim, kHalves, kRing>, grid,
               Size::kThreads, Size::kSharedBytes, stream, params);
}

void map_cache(CUtensorMap& map, const Tensor& cache) {
  const auto slots = static_cast<cuuint64_t>(cache.shape[0] * cache.shape[1]);
  const auto columns = static_cast<cuuint64_t>(cache.shape[2] * cache.shape[3]);
  encode_tensor_map<2>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cache.data, {columns, slots},
                       {columns * 2}, {64, kBlockRows}, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <int kHeadDim>
void launch(const SplitParams& split_params, int64_t num_tokens, int64_t max_keys, Stream stream) {
  const AttentionParams& params = split_params.attention;
  const int64_t queries = std::min<int64_t>(params.num_seqs, num_tokens);
  if (!params.only_splits) {
    // As many blocks as there can be row tiles.
    using Size = Sizes<kHeadDim>;
    using WgmmaSize = WgmmaSizes<kHeadDim>;
    const bool wgmma = has_wgmma();
    const int64_t tile_rows = wgmma ? WgmmaSize::kTileRows : Size::kTileRows;
    const int64_t row_tiles = queries + num_tokens * params.group / tile_rows;
    launch_early(
        "paged_attention",
        wgmma ? attend_row_tiles_wgmma_kernel<kHeadDim> : attend_row_tiles_kernel<kHeadDim>,
        dim3(static_cast<unsigned>(row_tiles * params.num_kv_heads)),
        wgmma ? WgmmaSize::kThreads : kThreads,
        wgmma ? WgmmaSize::kSharedBytes : Size::kSharedBytes, stream, params);
  }
  const int64_t splits = std::max<int64_t>(
      1, (max_keys + kFineSplit * kTileKeys - 1) / (kFineSplit * kTileKeys));  // or fewer
  // Two blocks of large rings fit an SM with 227 KiB of shared memory.
  constexpr int kLarge = kLargeRing<kHeadDim>, kSmall = kSmallRing<kHeadDim>;
  const bool fits = max_shared_bytes() >= 2 * (SplitSizes<kHeadDim, kLarge>::kSharedBytes + 4096);
  const bool few = kHeadDim == 64 && params.only_splits && params.num_seqs <= kFewSequences;
  const auto launch =
      params.group > kBlockRows / 2
          ? (fits ? launch_splits<kHeadDim, 2, kLarge> : launch_splits<kHeadDim, 2, kSmall>)
          : (fits && !few ? launch_splits<kHeadDim, 1, kLarge>
                          : launch_splits<kHeadDim, 1, kSmall>);
  launch(split_params, queries * splits, stream);
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("paged_attention: " + what);
}

bool aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (t.shape[0] <= 1 || t.strides[0] % 8 == 0);
}

}  // namespace

void paged_attention(const Tensor& out, const Tensor& q, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_tables, const Tensor& cu_seqlens_q,
                     const Tensor& seq_lens, float softmax_scale, int sliding_window,
                     Stream stream) {
  const int64_t num_tokens = q.shape[0], num_seqs = seq_lens.shape[0], head_dim = q.shape[2];
  const int64_t block_size = k_cache.shape[1], num_kv_heads = k_cache.shape[2];
  const int64_t group = q.shape[1] / num_kv_heads;
  if (head_dim != 64 && head_dim != 128) {
    refuse("expected head_dim 64 or 128, got " + std::to_string(head_dim));
  }
  if (block_size < kBlockRows || (block_size & (block_size - 1)) != 0) {
    refuse("expected block_size a power of two from 16 on, got " + std::to_string(block_size));
  }
  if (!aligned(out) || !aligned(q) || !aligned(k_cache) || !aligned(v_cache)) {
    refuse("expected every token of out, q and the caches to begin at a multiple of 16 bytes");
  }
  if (num_tokens == 0 || num_seqs == 0 || group == 0) return;
  const Workspace& memory = workspace();
  const int64_t part_floats = (std::min<int64_t>(group, kBlockRows) * (head_dim + 2) + 3) / 4 * 4;
  SplitParams split_params{};
  AttentionParams& params = split_params.attention;
  params.out = out.ptr<__nv_bfloat16>();
  params.q = q.ptr<__nv_bfloat16>();
  params.k_cache = k_cache.ptr<__nv_bfloat16>();
  params.v_cache = v_cache.ptr<__nv_bfloat16>();
  params.block_tables = block_tables.ptr<int32_t>();
  params.cu_seqlens_q = cu_seqlens_q.ptr<int32_t>();
  params.seq_lens = seq_lens.ptr<int32_t>();
  const int64_t head_units = num_kv_heads * ((group + kBlockRows - 1) / kBlockRows);
  params.parts = static_cast<float*>(memory.scratch);
  params.counters = memory.counters;
  params.max_counters = static_cast<int>(Workspace::kNumCounters);
  params.out_stride = out.strides[0];
  params.q_stride = q.strides[0];
  params.table_stride = block_tables.strides[0];
  params.num_seqs = static_cast<int>(num_seqs);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.group = static_cast<int>(group);
  while ((int64_t{1} << params.block_shift) < block_size) ++params.block_shift;
  params.window = sliding_window;
  params.part_floats = static_cast<int>(part_floats);
  params.max_slots = static_cast<int>(Workspace::kScratchBytes / (sizeof(float) * part_floats));
  params.head_units = static_cast<int>(head_units);
  params.only_splits = num_tokens <= num_seqs;
  params.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  const int64_t max_keys = block_tables.shape[1] * block_size;
  if (compute_capability_major() >= 9 && k_cache.shape[0] > 0) {
    map_cache(split_params.k_map, k_cache);
    map_cache(split_params.v_map, v_cache);
  }
  head_dim == 64 ? launch<64>(split_params, num_tokens, max_keys, stream)
                 : launch<128>(split_params, num_tokens, max_keys, stream);
}

}  // namespace tinyvllm::cuda
