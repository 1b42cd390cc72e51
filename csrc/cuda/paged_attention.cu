// out[t,h] = sum over keys j of softmax(q[t,h] . k[j,h'] * softmax_scale)[j] * v[j,h'], where j
// runs over the keys that token t may see and h' = h / group is the kv head that its query head
// shares.
//
// Layout. k_cache and v_cache are [num_blocks, block_size, num_kv_heads, head_dim] bf16; key j of
// sequence s lies in block block_tables[s][j / block_size]. Keys are taken in tiles of 64, aligned
// to absolute positions; two tiles make a split, from key 16384 on eight. The queries of one kv
// head are rows, `group` for each token.
//
//   keys   0 ......... 63 | 64 ....... 127 | 128 ...... 191 | 192 ...... 255 | 256 ...
//          [ tile 0      ]  [ tile 1      ]  [ tile 2      ]  [ tile 3      ]  [ tile 4
//          [ split 0                     ]  [ split 1                     ]  [ split 2
//
// A warp holds 16 rows (or twice 16) as mma.m16n8k16 fragments and passes over a tile:
//
//   s [16,64] = q [16,head_dim] k^T    then p = 2^(s * scale_log2 - m), the online softmax, in fp32
//   acc [16,head_dim] += bf16(p) v     where 4 lanes share a row, each with a quarter of s
//
// Within a split a row carries a running maximum m, a sum l and acc. Finished splits are merged in
// ascending order. A sequence with several queries makes row tiles, one with a single query
// (decode) makes splits; the arithmetic is the same.
//
//   attend_row_tiles_kernel   A block takes 128 rows (64 for head_dim 128) of one kv head. Its 4
//     warps share the tiles of keys, which come through a ring of three stages (two), and each
//     merges its rows' splits as it goes; the merged total waits in shared memory.
//
//   attend_splits_kernel      A warp, alone, takes up to 16 rows: a run of consecutive splits of
//     one query and kv head after the other, through a ring of its own that goes on into the next
//     run:
//
//       memory --cp.async--> [q][k 0..63][v 0..63][k 64..127][v 64..127] .. [q of the next run] ..
//
//     The splits of all queries, laid end to end, are cut into equal ranges, one for every group of
//     warps; the warps of a group take one kv head each and read the same blocks.
//
//       query   | 0                | 1        | 2     | 3                |
//       range   [  group 0  ][  group 1  ][  group 2    ][  group 3      ]
//
//     Query 2 lies in one range: its rows are merged and stored at once. Of a query that is divided
//     the first range leaves one part, all of its splits merged, and the others one for each split.
//
//   merge_splits_kernel       merges these: a block for each query and kv head.
//
// A row's bits depend on the row alone, however its prompt was cut and whatever runs beside it:
// boundaries are absolute, a row of an mma does not see the other rows, keys that a row may not see
// add p = 0, and merging is the same fused multiply-adds wherever it is done. (v must be finite.)
//
// Work list. The grids depend on the sizes of the tensors alone, so a graph can hold them; warps
// find their work by scanning the lengths, 32 sequences at a time. A call with no more tokens than
// sequences (decode) launches no row tiles: should a sequence have several queries there after all,
// each is a query of its own. The first row tiles are dealt out, longest first, the others taken
// from a counter, which the last block to finish resets.
//
// Memory (head_dim 64 | 128). Row tiles: 128 threads of 254 | 234 registers, 80 | 96 KiB of shared
// memory. Splits: 128 | 64 threads of 201 | 255 registers (222 | 255 for groups above 8), 96 KiB.
// Two blocks of either per SM. Merge: 127 registers. Workspace: min(group, 16) * (head_dim + 2)
// floats for each split. If those of all splits would not fit, ranges end with queries and nothing
// is divided: as right, less parallel.
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

constexpr int kTileKeys = 64;
// Splits are of 2 tiles up to tile 256, of 8 from there on: fine ones feed more warps, coarse ones
// leave less to merge.
constexpr int kFineTiles = 256, kFineSplit = 2, kCoarseSplit = 8;
constexpr int kBlockRows = 16;  // of an mma, and keys that surely lie in one block of the cache
constexpr int kTileBlocks = kTileKeys / kBlockRows;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
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

// Of attend_splits_kernel. A slot of a warp's ring holds the k or the v of a tile, and two of three
// slots are on their way: 128 KiB per SM.
template <int kHeadDim>
struct SplitSizes {
  static constexpr int kSlotBytes = kTileKeys * kHeadDim * 2;
  static constexpr int kRing = 3;
  static constexpr int kWarps = kHeadDim == 64 ? 4 : 2;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kSharedBytes = kWarps * kRing * kSlotBytes;
};

// A query whose splits were divided: its first ones are one part, in `slot`, each other has its
// own.
struct MergeItem {
  int token, slot;           // slot: of its first split and head unit 0
  int first_splits, splits;  // equal: there is nothing to merge
};

struct MergeList {
  int4 num_queries;   // in x
  MergeItem items[];  // [num_queries]
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
  MergeList* merge_list;         // what merge_splits_kernel is to do
  uint32_t* counters;            // Counter
  int64_t out_stride, q_stride, table_stride;
  int num_seqs, num_kv_heads, group;
  int head_units;   // num_kv_heads * ceil(group / 16): what a warp takes of a query
  int block_shift;  // log2(block_size)
  int window;       // <= 0: none
  int part_floats, max_slots;
  int split_warps;   // of attend_splits_kernel
  bool only_splits;  // every query is a query of its own, there are no row tiles
  float scale_log2;  // softmax_scale * log2(e)
};

enum Counter { kNextRowTile, kBlocksDone };

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

// Columns 16 * block .. of s: the products with 16 keys.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void score_keys(float (&s)[kBlocks][kTileKeys / 8][4], int block,
                                           const QueryFragments<kHeadDim, kBlocks>& q,
                                           uint32_t keys) {
  const int lane = lane_id(), row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
  const uint32_t address = keys + row * Sizes<kHeadDim>::kRowBytes + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][2 * block][i] = s[b][2 * block + 1][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    Fragment4 f;
    load_matrices(f, address ^ (k * 32));
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
  const uint32_t address = values + row * Sizes<kHeadDim>::kRowBytes + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    Fragment4 f;
    load_matrices_transposed(f, address ^ (d * 32));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      multiply_add(rows.acc[b][2 * d], p[b][block], f[0], f[1]);
      multiply_add(rows.acc[b][2 * d + 1], p[b][block], f[2], f[3]);
    }
  }
}

// One step of the online softmax: s becomes p, and what was summed before shrinks. Lane 4 * g + t
// holds keys base + 8n + 2t, + 1 of s. A row sees keys (position - window, position]; kMasked is
// for tiles that some row does not see in full; with one half, rows 8 .. 15 of a block are not
// there.
template <bool kMasked, int kHalves, int kHeadDim, int kBlocks>
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
      if (h >= kHalves) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) p[b][n / 2][h + 2 * (n % 2)] = 0;
        continue;
      }
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
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const uint32_t pair =
            pack_bf16(exp2_approx(__fmaf_rn(s[b][n][2 * h], scale_log2, -origin)),
                      exp2_approx(__fmaf_rn(s[b][n][2 * h + 1], scale_log2, -origin)));
        p[b][n / 2][h + 2 * (n % 2)] = pair;
        // l sums what is multiplied with v: the rounded p.
        sum[0] = __fadd_rn(sum[0], __uint_as_float(pair << 16));
        sum[1] = __fadd_rn(sum[1], __uint_as_float(pair & 0xffff0000u));
      }
      rows.sum[b][h] = __fmaf_rn(rows.sum[b][h], keep[h], __fadd_rn(sum[0], sum[1]));
    }
    // Most tiles bring no new maximum: times 1 changes nothing.
    if (__any_sync(kAllLanes, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
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

// What a sequence asks of the kernels. The queries that go by splits are alike: each is given the
// tiles that any of them sees.
struct Sequence {
  int q_begin, q_len, seq_len;
  int queries;                // that go by splits
  int first_tile, num_tiles;  // of each of them
  int row_tiles;

  __device__ Sequence()
      : q_begin(0), q_len(0), seq_len(0), queries(0), num_tiles(0), row_tiles(0) {}

  __device__ Sequence(const AttentionParams& p, int s, int tile_rows) : Sequence() {
    if (s >= p.num_seqs) return;
    q_begin = __ldg(p.cu_seqlens_q + s);
    q_len = max(0, __ldg(p.cu_seqlens_q + s + 1) - q_begin);
    seq_len = __ldg(p.seq_lens + s);
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
  __device__ Sequences(const AttentionParams& params, int tile_rows)
      : p_(params), tile_rows_(tile_rows) {}

  // The sequence of row tile `i` of all, counted once a kv head. False when there are not so many.
  __device__ bool find_row_tile(int i) { return find(i, row_tiles_); }
  // That of tile `i` of the queries that go by splits.
  __device__ bool find_tile(int i) { return find(i, tiles_); }

  int seq;                                                            // found
  Sequence sequence;                                                  // the same
  int row_tiles_before, tiles_before, queries_before, splits_before;  // in the sequences before it

 private:
  // A running sum: at the end of the 32, and up to and with this lane's sequence.
  struct Sum {
    int end = 0, past = 0;

    __device__ void add(int x) {
      past = end + scan_lanes(x);
      end = __shfl_sync(kAllLanes, past, 31);
    }
  };

  __device__ bool find(int i, const Sum& sum) {
    while (i >= sum.end) {
      if (first_seq_ + 32 >= p_.num_seqs) return false;
      first_seq_ += 32;
      mine_ = Sequence(p_, first_seq_ + lane_id(), tile_rows_);
      row_tiles_.add(mine_.row_tiles);
      tiles_.add(mine_.queries * mine_.num_tiles);
      queries_.add(mine_.queries);
      splits_.add(mine_.queries * mine_.num_splits());
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

  __device__ __forceinline__ void copy(uint32_t to, const __nv_bfloat16* cache, int64_t offset,
                                       int key) const {
    const __nv_bfloat16* from = cache + offset;
    const bool whole = key >= first_ && key + kBlockRows <= past_;
#pragma unroll
    for (int i = 0; i < kBlockRows; i += kRows) {
      const int row = row_ + i;
      const uint32_t place = to + row * kHeadDim * 2 + ((chunk_ ^ (row % 8)) * 16);
      if (whole) {
        copy_16_async(place, from);
      } else {
        copy_16_async(place, from, key + row >= first_ && key + row < past_);
      }
      from += kRows * token_elements_;
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

template <int kHeadDim>
class RowTiles {
  using Size = Sizes<kHeadDim>;
  static constexpr int kBlocks = Size::kRowBlocks;
  static constexpr int kStages = Size::kStages;

 public:
  __device__ RowTiles(const AttentionParams& params, char* shared)
      : p_(params),
        stages_(shared_address(shared)),
        totals_(reinterpret_cast<float4*>(shared + kStages * 2 * Size::kTileBytes) + threadIdx.x),
        sequences_(params, Size::kTileRows),
        copier_(params, threadIdx.x / Size::kChunks, threadIdx.x % Size::kChunks) {}

  __device__ void run(int num_items) {
    __shared__ int next_item;
    const bool taking = num_items > static_cast<int>(gridDim.x);
    for (int item = blockIdx.x; item < num_items; item = next_item) {
      int taken = num_items;
      if (taking && threadIdx.x == 0) {
        taken = gridDim.x + static_cast<int>(atomicAdd(p_.counters + kNextRowTile, 1u));
      }
      sequences_.find_row_tile(item / p_.num_kv_heads);
      attend(item / p_.num_kv_heads - sequences_.row_tiles_before, item % p_.num_kv_heads);
      __syncthreads();  // the stages are free, and so is next_item
      if (threadIdx.x == 0) next_item = taken;
      __syncthreads();
    }
  }

 private:
  __device__ void attend(int row_tile, int kv_head) {
    const Sequence& sequence = sequences_.sequence;
    kv_head_ = kv_head;
    // The longest first: the last row tile sees most keys.
    const int first_row = (sequence.row_tiles - 1 - row_tile) * Size::kTileRows;
    const int last_row = min(first_row + Size::kTileRows, sequence.q_len * p_.group) - 1;
    const int first_position = sequence.seq_len - sequence.q_len;
    first_key_ = first_visible(p_, first_position + first_row / p_.group);
    past_key_ = max(0, first_position + last_row / p_.group + 1);
    const int begin = first_key_ / kTileKeys, end = (past_key_ + kTileKeys - 1) / kTileKeys;
    copier_.open(sequences_.seq, kv_head, first_key_, past_key_);

    const int warp = threadIdx.x / 32, warp_row = first_row + warp * kBlocks * 16;
    int position[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row + b * 16 + lane_id() / 4 + h * 8;
        position[b][h] = first_position + min(row, last_row) / p_.group;
      }
    }
    // The warp's keys are (lowest - window, highest], all of them seen by all rows up to `lowest`.
    const int lowest = first_position + min(warp_row, last_row) / p_.group;
    const int highest =
        warp_row > last_row
            ? -1
            : first_position + min(warp_row + kBlocks * 16 - 1, last_row) / p_.group;

    // q comes through the stage that is filled last.
    copy_queries(first_row, last_row, stages_ + (kStages - 1) * 2 * Size::kTileBytes);
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
    has_total_ = false;
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
        add_to_total(rows);
        store_total(rows);
        rows.reset();
      }
    }
    add_to_total(rows);
    store_rows(rows, warp_row, last_row);
  }

  __device__ void copy_queries(int first_row, int last_row, uint32_t to) {
    constexpr int kRows = kThreads / Size::kChunks;  // at a time
    const int chunk = threadIdx.x % Size::kChunks;
#pragma unroll
    for (int i = 0; i < Size::kTileRows / kRows; ++i) {
      const int row = threadIdx.x / Size::kChunks + i * kRows;
      const int at = min(first_row + row, last_row);
      const int64_t token = sequences_.sequence.q_begin + at / p_.group;
      const int head = kv_head_ * p_.group + at % p_.group;
      copy_16_async(to + row * Size::kRowBytes + ((chunk ^ (row % 8)) * 16),
                    p_.q + token * p_.q_stride + head * kHeadDim + chunk * 8,
                    first_row + row <= last_row);
    }
  }

  __device__ void copy_tile(int tile, int stage) {
    const uint32_t to = stages_ + stage * 2 * Size::kTileBytes;
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kBlockRows) {
      const int key = tile * kTileKeys + i;
      const int64_t offset = copier_.offset_of(key);
      copier_.copy(to + i * Size::kRowBytes, p_.k_cache, offset, key);
      copier_.copy(to + i * Size::kRowBytes + Size::kTileBytes, p_.v_cache, offset, key);
    }
  }

  __device__ __forceinline__ void attend_tile(Rows<kHeadDim, kBlocks>& rows,
                                              const QueryFragments<kHeadDim, kBlocks>& q,
                                              const int (&position)[kBlocks][2], uint32_t stage,
                                              int base, bool masked) {
    float s[kBlocks][kTileKeys / 8][4];
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      score_keys<kHeadDim, kBlocks>(s, i, q, stage + i * kBlockRows * Size::kRowBytes);
    }
    Fragment4 p[kBlocks][kTileBlocks];
    if (masked) {
      softmax_step<true, 2>(p, s, rows, position, base, p_.window, p_.scale_log2);
    } else {
      softmax_step<false, 2>(p, s, rows, position, base, p_.window, p_.scale_log2);
    }
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      add_values<kHeadDim, kBlocks>(rows, p, i,
                                    stage + Size::kTileBytes + i * kBlockRows * Size::kRowBytes);
    }
  }

  // rows = total + rows. The total of acc lies in shared memory, four floats a thread in turn.
  __device__ __forceinline__ void add_to_total(Rows<kHeadDim, kBlocks>& rows) {
    rows.sum_lanes();
    if (!has_total_) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const Merge merge[2] = {{total_max_[b][0], rows.max[b][0]},
                              {total_max_[b][1], rows.max[b][1]}};
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float4 total = totals_[(b * (kHeadDim / 8) + n) * kThreads];
        float (&acc)[4] = rows.acc[b][n];
        acc[0] = merge[0](total.x, acc[0]);
        acc[1] = merge[0](total.y, acc[1]);
        acc[2] = merge[1](total.z, acc[2]);
        acc[3] = merge[1](total.w, acc[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows.sum[b][h] = merge[h](total_sum_[b][h], rows.sum[b][h]);
        rows.max[b][h] = merge[h].max;
      }
    }
  }

  __device__ __forceinline__ void store_total(const Rows<kHeadDim, kBlocks>& rows) {
    has_total_ = true;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float (&acc)[4] = rows.acc[b][n];
        totals_[(b * (kHeadDim / 8) + n) * kThreads] = {acc[0], acc[1], acc[2], acc[3]};
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total_sum_[b][h] = rows.sum[b][h];
        total_max_[b][h] = rows.max[b][h];
      }
    }
  }

  __device__ __forceinline__ void store_rows(const Rows<kHeadDim, kBlocks>& rows, int warp_row,
                                             int last_row) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row + b * 16 + lane_id() / 4 + h * 8;
        if (row > last_row) continue;
        const float inverse_sum = inverse(rows.sum[b][h]);
        const int64_t token = sequences_.sequence.q_begin + row / p_.group;
        const int head = kv_head_ * p_.group + row % p_.group;
        auto* out = reinterpret_cast<uint32_t*>(p_.out + token * p_.out_stride + head * kHeadDim) +
                    lane_id() % 4;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          out[n * 4] = finish(rows.acc[b][n][2 * h], rows.acc[b][n][2 * h + 1], inverse_sum);
        }
      }
    }
  }

  const AttentionParams& p_;
  const uint32_t stages_;  // [kStages][k, v][kTileKeys rows]
  float4* const totals_;   // this thread's, kThreads apart
  Sequences sequences_;
  BlockCopier<kHeadDim, kThreads / Size::kChunks> copier_;
  int kv_head_, first_key_, past_key_;  // of the item
  bool has_total_;
  float total_max_[kBlocks][2], total_sum_[kBlocks][2];
};

// ---- Splits -------------------------------------------------------------------------------------

// How the queries' splits are divided over groups of warps: group g takes the splits that begin in
// its range of the tiles of all queries.
struct Division {
  int64_t tiles;
  int queries, groups;
  bool divided;  // else ranges end with queries

  // All lanes together.
  __device__ explicit Division(const AttentionParams& p) {
    int lane_tiles = 0, lane_splits = 0, lane_queries = 0;
    for (int s = lane_id(); s < p.num_seqs; s += 32) {
      const Sequence sequence(p, s, 1);
      lane_tiles += sequence.queries * sequence.num_tiles;
      lane_splits += sequence.queries * sequence.num_splits();
      lane_queries += sequence.queries;
    }
    tiles = __reduce_add_sync(kAllLanes, lane_tiles);
    queries = __reduce_add_sync(kAllLanes, lane_queries);
    const int splits = __reduce_add_sync(kAllLanes, lane_splits);
    groups = max(1, min(p.split_warps / p.head_units, splits));
    divided = static_cast<int64_t>(splits) * p.head_units <= p.max_slots;
  }

  __device__ int begin_of(int group) const { return static_cast<int>(tiles * group / groups); }
};

// Up to 16 rows: query heads of one token that share a kv head.
struct HeadUnit {
  int index, kv_head, first_head, rows;

  __device__ HeadUnit(const AttentionParams& p, int i) : index(i) {
    const int units = p.head_units / p.num_kv_heads, first_row = i % units * kBlockRows;
    kv_head = i / units;
    first_head = kv_head * p.group + first_row;
    rows = min(kBlockRows, p.group - first_row);
  }
};

// Consecutive splits of one query. Lies beside the slot with its q.
struct alignas(16) Run {
  int token;  // -1: the stream ends here
  int position;
  int begin, end;  // keys that it sees; begin is that of a tile
  int first_split, splits;
  int slot;                                   // of its first split
  enum Kind { kWhole, kFirst, kOther } kind;  // all splits of the query; its first ones; others
};

// Finds the runs of a warp. Not inlined, so that what it remembers stays out of the registers of
// the loops that it is called from, rarely.
class RunFinder {
 public:
  __device__ RunFinder(const AttentionParams& params, const Division& division, int group, int unit)
      : p_(params),
        divided_(division.divided),
        unit_(unit),
        next_tile_(division.begin_of(group)),
        past_tile_(division.begin_of(group + 1)),
        sequences_(params, 1) {}

  int seq;  // of the run found

  // False at the end of the range. All lanes together.
  __device__ __noinline__ bool next(Run& run) {
    while (next_tile_ < past_tile_ && sequences_.find_tile(next_tile_)) {
      const Sequence& sequence = sequences_.sequence;
      const int num_tiles = sequence.num_tiles;
      const int query = (next_tile_ - sequences_.tiles_before) / num_tiles;
      const int origin = sequences_.tiles_before + query * num_tiles;
      int tile = sequence.next_split(next_tile_ - origin);
      int past = sequence.next_split(min(num_tiles, past_tile_ - origin));
      if (!divided_) {
        if (tile > 0) tile = num_tiles;
        past = num_tiles;
      }
      next_tile_ = origin + max(tile, past);
      if (tile >= past) continue;

      const int first_tile = sequence.first_tile, splits = sequence.num_splits();
      const int before = sequence.splits_before(tile);
      seq = sequences_.seq;
      run.token = sequence.q_begin + query;
      run.position = sequence.seq_len - sequence.q_len + query;
      run.begin = max((first_tile + tile) * kTileKeys,
                      first_visible(p_, run.position) / kTileKeys * kTileKeys);
      run.end = min((first_tile + past) * kTileKeys, run.position + 1);
      run.first_split = split_of(first_tile + tile);
      run.splits = sequence.splits_before(past) - before;
      run.slot = (sequences_.splits_before + query * splits + before) * p_.head_units + unit_;
      run.kind = tile > 0 ? Run::kOther : past < num_tiles ? Run::kFirst : Run::kWhole;
      if (tile == 0 && unit_ == 0 && lane_id() == 0) {
        p_.merge_list->items[sequences_.queries_before + query] = {run.token, run.slot, run.splits,
                                                                   splits};
      }
      return true;
    }
    return false;
  }

 private:
  const AttentionParams& p_;
  const bool divided_;
  const int unit_;
  int next_tile_;  // where the next run may begin
  const int past_tile_;
  Sequences sequences_;
};

// Writes the stream of a warp into its ring: for each run q, then the k and v of each of its tiles.
template <int kHeadDim>
class SplitProducer {
  using Size = SplitSizes<kHeadDim>;
  static constexpr int kChunks = Sizes<kHeadDim>::kChunks;
  static constexpr int kRows = 32 / kChunks;  // that a warp copies at a time

 public:
  __device__ SplitProducer(const AttentionParams& params, const HeadUnit& unit, RunFinder& finder,
                           uint32_t ring, Run* runs)
      : p_(params),
        unit_(unit),
        finder_(finder),
        ring_(ring),
        runs_(runs),
        copier_(params, lane_id() / kChunks, lane_id() % kChunks) {}

  // Fills the next slot, in a group of copies of its own.
  __device__ __forceinline__ void step() {
    const uint32_t to = ring_ + slot_ * Size::kSlotBytes;
    if (next_ == Next::kRun) {
      open_run(to);
    } else if (next_ != Next::kNothing) {
      const __nv_bfloat16* cache = next_ == Next::kKeys ? p_.k_cache : p_.v_cache;
#pragma unroll
      for (int i = 0; i < kTileKeys; i += kBlockRows) {
        if (tile_ + i >= past_key_) break;
        copier_.copy(to + i * kHeadDim * 2, cache, copier_.offset_of(tile_ + i), tile_ + i);
      }
      if (next_ == Next::kKeys) {
        next_ = Next::kValues;
      } else {
        tile_ += kTileKeys;
        next_ = tile_ < past_key_ ? Next::kKeys : Next::kRun;
      }
    }
    commit_copies();
    slot_ = slot_ + 1 == Size::kRing ? 0 : slot_ + 1;
  }

 private:
  enum class Next { kRun, kKeys, kValues, kNothing };

  __device__ void open_run(uint32_t to) {
    Run run{};
    if (finder_.next(run)) {
      past_key_ = run.end;
      tile_ = run.begin;
      next_ = tile_ < past_key_ ? Next::kKeys : Next::kRun;
      copier_.open(finder_.seq, unit_.kv_head, first_visible(p_, run.position), past_key_);
      const __nv_bfloat16* q = p_.q + run.token * p_.q_stride + unit_.first_head * kHeadDim;
#pragma unroll
      for (int i = 0; i < kBlockRows; i += kRows) {
        const int row = lane_id() / kChunks + i, chunk = lane_id() % kChunks;
        copy_16_async(to + row * kHeadDim * 2 + ((chunk ^ (row % 8)) * 16),
                      q + row * kHeadDim + chunk * 8, row < unit_.rows);
      }
    } else {
      run.token = -1;
      next_ = Next::kNothing;
    }
    if (lane_id() == 0) runs_[slot_] = run;
  }

  const AttentionParams& p_;
  const HeadUnit& unit_;
  RunFinder& finder_;
  const uint32_t ring_;
  Run* const runs_;
  BlockCopier<kHeadDim, kRows> copier_;
  Next next_ = Next::kRun;
  int slot_ = 0;
  int past_key_, tile_;  // of the run, and where it is
};

template <int kHeadDim, int kHalves>
class Splits {
  using Size = SplitSizes<kHeadDim>;

 public:
  __device__ Splits(const AttentionParams& params, const HeadUnit& unit, RunFinder& finder,
                    uint32_t ring, Run* runs)
      : p_(params),
        unit_(unit),
        ring_(ring),
        runs_(runs),
        producer_(params, unit, finder, ring, runs) {}

  __device__ void attend() {
    for (int i = 0; i < Size::kRing - 1; ++i) producer_.step();
    for (;;) {
      const int opened = slot_;
      const uint32_t queries = next_slot();
      const Run run = runs_[opened];
      if (run.token < 0) break;
      attend(run, queries);
    }
  }

 private:
  // The address of the next slot, with its rows in it; the slot before it is refilled.
  __device__ __forceinline__ uint32_t next_slot() {
    wait_copies<Size::kRing - 2>();
    __syncwarp();  // every lane's copies are there, and every lane is done with the slot before
    producer_.step();
    const uint32_t address = ring_ + slot_ * Size::kSlotBytes;
    slot_ = slot_ + 1 == Size::kRing ? 0 : slot_ + 1;
    return address;
  }

  __device__ void attend(const Run& run, uint32_t queries) {
    QueryFragments<kHeadDim, 1> q;
    load_queries<kHeadDim>(q[0], queries);
    Rows<kHeadDim, 1> rows, total;
    total.reset();
    for (int i = 0; i < run.splits; ++i) {
      const int split = run.first_split + i;
      const int end = min(run.end, split_begin(split + 1) * kTileKeys);
      rows.reset();
      for (int base = max(run.begin, split_begin(split) * kTileKeys); base < end;
           base += kTileKeys) {
        attend_tile(rows, q, run.position, base, end);
      }
      rows.sum_lanes();
      if (run.kind == Run::kOther) {
        store_part(run.slot + i * p_.head_units, rows);
      } else {
        merge_into(total, rows);
      }
    }
    if (run.kind == Run::kWhole) {
      store_rows(run.token, total);
    } else if (run.kind == Run::kFirst) {
      store_part(run.slot, total);
    }
  }

  __device__ __forceinline__ void attend_tile(Rows<kHeadDim, 1>& rows,
                                              const QueryFragments<kHeadDim, 1>& q, int position,
                                              int base, int end) {
    float s[1][kTileKeys / 8][4];
    const uint32_t keys = next_slot();
    // What lies behind the last key is hidden by the mask, whatever it is.
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      score_keys<kHeadDim, 1>(s, i, q, keys + i * kBlockRows * kHeadDim * 2);
    }
    Fragment4 p[1][kTileBlocks];
    const int positions[1][2] = {{position, position}};
    if (base + kTileKeys > end || (p_.window > 0 && base <= position - p_.window)) {
      softmax_step<true, kHalves>(p, s, rows, positions, base, p_.window, p_.scale_log2);
    } else {
      softmax_step<false, kHalves>(p, s, rows, positions, base, p_.window, p_.scale_log2);
    }
    const uint32_t values = next_slot();
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      if (base + i * kBlockRows < end) {
        add_values<kHeadDim, 1>(rows, p, i, values + i * kBlockRows * kHeadDim * 2);
      }
    }
  }

  __device__ __forceinline__ void merge_into(Rows<kHeadDim, 1>& total,
                                             const Rows<kHeadDim, 1>& part) {
    const Merge merge[2] = {{total.max[0][0], part.max[0][0]}, {total.max[0][1], part.max[0][1]}};
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) {
        total.acc[0][n][i] = merge[i / 2](total.acc[0][n][i], part.acc[0][n][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      total.sum[0][h] = merge[h](total.sum[0][h], part.sum[0][h]);
      total.max[0][h] = merge[h].max;
    }
  }

  __device__ __forceinline__ void store_rows(int token, const Rows<kHeadDim, 1>& rows) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane_id() / 4 + h * 8;
      if (row >= unit_.rows) continue;
      const float inverse_sum = inverse(rows.sum[0][h]);
      auto* out = reinterpret_cast<uint32_t*>(p_.out + token * p_.out_stride +
                                              (unit_.first_head + row) * kHeadDim) +
                  lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        out[n * 4] = finish(rows.acc[0][n][2 * h], rows.acc[0][n][2 * h + 1], inverse_sum);
      }
    }
  }

  __device__ __forceinline__ void store_part(int slot, const Rows<kHeadDim, 1>& rows) {
    float* part = p_.parts + static_cast<int64_t>(slot) * p_.part_floats;
    const int part_rows = min(p_.group, kBlockRows);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane_id() / 4 + h * 8;
      if (row >= unit_.rows) continue;
      auto* acc = reinterpret_cast<float2*>(part + row * kHeadDim) + lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        acc[n * 4] = {rows.acc[0][n][2 * h], rows.acc[0][n][2 * h + 1]};
      }
      if (lane_id() % 4 == 0) {
        reinterpret_cast<float2*>(part + part_rows * kHeadDim)[row] = {rows.max[0][h],
                                                                       rows.sum[0][h]};
      }
    }
  }

  const AttentionParams& p_;
  const HeadUnit& unit_;
  const uint32_t ring_;
  Run* const runs_;
  int slot_ = 0;
  SplitProducer<kHeadDim> producer_;
};

// ---- Kernels and launcher -----------------------------------------------------------------------

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    attend_row_tiles_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(1024) char shared[];
  wait_for_previous_kernels();
  let_next_kernel_start();
  int row_tiles = 0;
  for (int s = lane_id(); s < p.num_seqs; s += 32) {
    row_tiles += Sequence(p, s, Sizes<kHeadDim>::kTileRows).row_tiles;
  }
  row_tiles = __reduce_add_sync(kAllLanes, row_tiles) * p.num_kv_heads;
  RowTiles<kHeadDim>(p, shared).run(row_tiles);
  if (row_tiles > static_cast<int>(gridDim.x) && threadIdx.x == 0) {
    // This block takes no more.
    if (atomicAdd(p.counters + kBlocksDone, 1u) == gridDim.x - 1) {
      p.counters[kNextRowTile] = p.counters[kBlocksDone] = 0;
    }
  }
}

template <int kHeadDim, int kHalves>
__global__ void __launch_bounds__(SplitSizes<kHeadDim>::kWarps * 32,
                                  SplitSizes<kHeadDim>::kBlocksPerSm)
    attend_splits_kernel(const __grid_constant__ AttentionParams p) {
  using Size = SplitSizes<kHeadDim>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Run runs[Size::kWarps][Size::kRing];
  wait_for_previous_kernels();
  let_next_kernel_start();
  const Division division(p);
  if (blockIdx.x == 0 && threadIdx.x == 0) p.merge_list->num_queries.x = division.queries;
  // With work for every warp those of one group share a block; else they are on different
  // multiprocessors, which are all needed.
  const int warp_in_block = threadIdx.x / 32, all_groups = p.split_warps / p.head_units;
  const int warp = division.groups == all_groups ? blockIdx.x * Size::kWarps + warp_in_block
                                                 : warp_in_block * gridDim.x + blockIdx.x;
  const int group = warp / p.head_units;
  if (group >= division.groups) return;
  const HeadUnit unit(p, warp % p.head_units);
  const uint32_t ring = shared_address(shared) + warp_in_block * Size::kRing * Size::kSlotBytes;
  RunFinder finder(p, division, group, unit.index);
  Splits<kHeadDim, kHalves>(p, unit, finder, ring, runs[warp_in_block]).attend();
}

constexpr int kMergeThreads = 512;

// Block (i, u): head unit u of query i of those that go by splits; four columns a thread.
template <int kHeadDim>
__global__ void __launch_bounds__(kMergeThreads)
    merge_splits_kernel(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernels();
  let_next_kernel_start();
  const int num_queries = p.merge_list->num_queries.x;
  const MergeItem item = p.merge_list->items[blockIdx.x];
  if (blockIdx.x >= num_queries || item.first_splits == item.splits) return;

  constexpr int kAhead = 16;  // parts on their way
  const HeadUnit unit(p, blockIdx.y);
  const int64_t stride = static_cast<int64_t>(p.head_units) * p.part_floats;
  const float* parts = p.parts + static_cast<int64_t>(item.slot + unit.index) * p.part_floats;
  const float* max_sums = parts + min(p.group, kBlockRows) * kHeadDim;
  const int num_parts = item.splits - item.first_splits + 1;
  for (int i = threadIdx.x * 4; i < unit.rows * kHeadDim; i += blockDim.x * 4) {
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
          const int split = first + j == 0 ? 0 : item.first_splits + first + j - 1;
          part[j] = *reinterpret_cast<const float4*>(parts + split * stride + i);
          max_sum[j] = *reinterpret_cast<const float2*>(max_sums + split * stride + row * 2);
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
    auto* out = p.out + item.token * p.out_stride + (unit.first_head + row) * kHeadDim + column;
    *reinterpret_cast<uint2*>(out) = {finish(total.x, total.y, inverse_sum),
                                      finish(total.z, total.w, inverse_sum)};
  }
}

template <int kHeadDim>
void launch(AttentionParams params, int64_t num_tokens, int64_t max_keys, Stream stream) {
  using Size = Sizes<kHeadDim>;
  using SplitSize = SplitSizes<kHeadDim>;
  const char* op = "paged_attention";
  const int64_t queries = std::min<int64_t>(params.num_seqs, num_tokens);
  const auto grid = [](int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); };
  if (!params.only_splits) {
    // No more blocks than there can be row tiles.
    const int64_t row_tiles = queries + num_tokens * params.group / Size::kTileRows;
    launch_early(
        op, attend_row_tiles_kernel<kHeadDim>,
        grid(std::min<int64_t>(2 * num_multiprocessors(), row_tiles * params.num_kv_heads)),
        kThreads, Size::kSharedBytes, stream, params);
  }
  const int64_t splits = std::max<int64_t>(
      1, (max_keys + kFineSplit * kTileKeys - 1) / (kFineSplit * kTileKeys));  // or fewer
  const int64_t blocks =
      std::max<int64_t>(std::min<int64_t>(SplitSize::kBlocksPerSm * num_multiprocessors(),
                                          queries * splits * params.head_units),
                        (params.head_units + SplitSize::kWarps - 1) / SplitSize::kWarps);
  params.split_warps = static_cast<int>(blocks) * SplitSize::kWarps;
  launch_early(op,
               params.group <= kBlockRows / 2 ? attend_splits_kernel<kHeadDim, 1>
                                              : attend_splits_kernel<kHeadDim, 2>,
               grid(blocks), SplitSize::kWarps * 32, SplitSize::kSharedBytes, stream, params);
  if (splits == 1) return;
  const int threads = std::min(params.group, kBlockRows) * kHeadDim / 4;
  launch_early(op, merge_splits_kernel<kHeadDim>,
               dim3(static_cast<unsigned>(queries), static_cast<unsigned>(params.head_units)),
               std::min(threads, kMergeThreads), 0, stream, params);
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
  AttentionParams params{};
  params.out = out.ptr<__nv_bfloat16>();
  params.q = q.ptr<__nv_bfloat16>();
  params.k_cache = k_cache.ptr<__nv_bfloat16>();
  params.v_cache = v_cache.ptr<__nv_bfloat16>();
  params.block_tables = block_tables.ptr<int32_t>();
  params.cu_seqlens_q = cu_seqlens_q.ptr<int32_t>();
  params.seq_lens = seq_lens.ptr<int32_t>();
  const int64_t list_bytes =
      (static_cast<int64_t>(sizeof(MergeList) + num_seqs * sizeof(MergeItem)) + 255) / 256 * 256;
  const int64_t part_bytes = static_cast<int64_t>(Workspace::kScratchBytes) - list_bytes;
  if (part_bytes < 0) refuse("too many sequences for the workspace: " + std::to_string(num_seqs));
  params.merge_list = static_cast<MergeList*>(memory.scratch);
  params.parts = reinterpret_cast<float*>(static_cast<char*>(memory.scratch) + list_bytes);
  params.counters = memory.counters;
  params.out_stride = out.strides[0];
  params.q_stride = q.strides[0];
  params.table_stride = block_tables.strides[0];
  params.num_seqs = static_cast<int>(num_seqs);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.group = static_cast<int>(group);
  while ((int64_t{1} << params.block_shift) < block_size) ++params.block_shift;
  params.window = sliding_window;
  params.part_floats = static_cast<int>(part_floats);
  params.max_slots = static_cast<int>(part_bytes / (4 * part_floats));
  params.head_units = static_cast<int>(num_kv_heads * ((group + kBlockRows - 1) / kBlockRows));
  params.only_splits = num_tokens <= num_seqs;
  params.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  const int64_t max_keys = block_tables.shape[1] * block_size;
  head_dim == 64 ? launch<64>(params, num_tokens, max_keys, stream)
                 : launch<128>(params, num_tokens, max_keys, stream);
}

}  // namespace tinyvllm::cuda
