// out[t,h] = sum over keys j of softmax(q[t,h] . k[j,h'] * softmax_scale)[j] * v[j,h'], where j runs
// over the keys that token t may see and h' = h / group is the kv head that its query head shares.
//
// Layout. k_cache and v_cache are [num_blocks, block_size, num_kv_heads, head_dim] bf16; key j of
// sequence s lies in block block_tables[s][j / block_size]. As in ../cpu, keys are taken in tiles of
// 64, aligned to absolute positions, four tiles make a split, and the queries of one kv head are
// rows, `group` for each token:
//
//   keys   0 ......... 63 | 64 ....... 127 | 128 ...... 191 | 192 ...... 255 | 256 ...
//          [ tile 0      ]  [ tile 1      ]  [ tile 2      ]  [ tile 3      ]  [ tile 4
//          [ split 0                                                        ]  [ split 1
//
// A warp holds 16 rows (or twice 16) as mma.m16n8k16 fragments and passes over a tile:
//
//   s [16,64] = q [16,head_dim] k^T    then p = 2^(s * scale_log2 - m), the online softmax, in fp32
//   acc [16,head_dim] += bf16(p) v     where 4 lanes share a row, each with a sixteenth of s
//
// Within a split a row carries a running maximum m, a sum l and acc. Finished splits are merged in
// ascending order. There are two kinds of work, with one arithmetic:
//
//   row tiles   A sequence with several queries, cut into 128 rows (64 for head_dim 128) of one kv
//               head. A block: its 4 warps share the tiles of keys, which come through a ring of
//               three stages (two), and each merges its rows' splits as it goes; the merged total
//               waits in shared memory, 64 floats a thread.
//   splits      A sequence with one query (decode) makes an item of every split and kv head: its
//               `group` rows fill part of the 16. A warp, alone, with a ring of its own:
//
//     memory --cp.async--> [q][k 0..15][k 16..31] .. [k 48..63][v 0..15] .. [q of the next item] ..
//
//               A slot is 16 rows of 16-byte chunks, and the ring runs on into the next item, so
//               about 18 KiB a warp, 144 KiB an SM, are always on their way. The parts go to the
//               workspace; the last warp to finish one of a sequence and kv head merges them.
//
// A row's bits depend on the row alone, however its prompt was cut and whatever runs beside it:
// boundaries are absolute, a row of an mma does not see the other rows, keys that a row may not see
// add p = 0, and merging is the same fused multiply-adds wherever it is done. (v must be finite.)
//
// Work list. The grid is fixed (two blocks per SM, less when there cannot be so much work), so a
// graph can hold it. Warps find their items by scanning the lengths, 32 sequences at a time. The
// first items are dealt out, the others taken from counters, which the last block to finish resets.
//
// Memory. Per block 80 KiB (head_dim 64) or 96 KiB (128) of shared memory; 128 threads, at most 255
// registers. Workspace: group * (head_dim + 2) floats for each split in flight. When 32 sequences
// have more splits than their share of it holds, their items are whole sequences: as right, less
// parallel.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "device.h"
#include "ops.h"
#include "tensor_cores.cuh"
#include "workspace.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kTileKeys = 64;
constexpr int kSplitKeys = 256;
constexpr int kSlotRows = 16;  // of a slot in a warp's ring
constexpr int kTileSlots = kTileKeys / kSlotRows;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxSplitRows = 16;  // a larger group goes by row tiles
constexpr float kNone = -INFINITY;
constexpr unsigned kAllLanes = ~0u;

template <int kHeadDim>
struct Sizes {
  static constexpr int kChunks = kHeadDim / 8;               // of 16 bytes, in a row
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kRowBlocks = kHeadDim == 64 ? 2 : 1;  // of 16 rows, for a warp of a row tile
  static constexpr int kTileRows = kWarps * kRowBlocks * 16;
  static constexpr int kStages = kHeadDim == 64 ? 3 : 2;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;   // of k or of v
  static constexpr int kTotals = kRowBlocks * kHeadDim / 2;  // floats of acc, for a thread
  static constexpr int kSharedBytes = kStages * 2 * kTileBytes + kThreads * kTotals * 4;
  static constexpr int kSlotBytes = kSlotRows * kRowBytes;
  static constexpr int kRing = kSharedBytes / kWarps / kSlotBytes;
  static_assert(kTileRows * kRowBytes <= 2 * kTileBytes, "the q of a row tile fits a stage");
};

struct AttentionParams {
  __nv_bfloat16* out;            // [T, num_heads, head_dim], token stride out_stride
  const __nv_bfloat16* q;        // [T, num_heads, head_dim], token stride q_stride
  const __nv_bfloat16* k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim]
  const __nv_bfloat16* v_cache;  // the same
  const int32_t* block_tables;   // [S, max_blocks], row stride table_stride
  const int32_t* cu_seqlens_q;   // [S + 1]
  const int32_t* seq_lens;       // [S]
  float* parts;                  // [slots, part_floats]: acc [group, head_dim], (m, l) [group, 2]
  uint32_t* counters;            // next row tile, next split, blocks done, -, then [S, num_kv_heads]
  int64_t out_stride, q_stride, table_stride;
  int num_seqs, num_kv_heads, group;
  int block_shift;  // log2(block_size)
  int window;       // <= 0: none
  int part_floats;
  int slots_per_32_seqs;
  float scale_log2;  // softmax_scale * log2(e)
};

enum Counter { kNextRowTile, kNextSplit, kBlocksDone, kFirstPartCounter = 4 };

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

// ---- The arithmetic of a tile -------------------------------------------------------------------

// What 16 * kBlocks rows have summed up. Lane 4 * g + t holds rows g and g + 8 of every block, and of
// their acc the columns 8n + 2t, 8n + 2t + 1; `sum` is over the lane's own keys until sum_lanes.
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

// Columns 16 * slot .. of s: the products with 16 keys.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void score_keys(float (&s)[kBlocks][kTileKeys / 8][4], int slot,
                                           const QueryFragments<kHeadDim, kBlocks>& q,
                                           uint32_t keys) {
  const int lane = lane_id(), row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
  const uint32_t address = keys + row * Sizes<kHeadDim>::kRowBytes + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][2 * slot][i] = s[b][2 * slot + 1][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    Fragment4 f;
    load_matrices(f, address ^ (k * 32));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      multiply_add(s[b][2 * slot], q[b][k], f[0], f[1]);
      multiply_add(s[b][2 * slot + 1], q[b][k], f[2], f[3]);
    }
  }
}

// Adds p [rows,16] x 16 values.
template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void add_values(Rows<kHeadDim, kBlocks>& rows,
                                           const Fragment4 (&p)[kBlocks][kTileSlots], int slot,
                                           uint32_t values) {
  const int lane = lane_id(), row = lane % 16, chunk = lane / 16;
  const uint32_t address = values + row * Sizes<kHeadDim>::kRowBytes + ((chunk ^ (lane % 8)) * 16);
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    Fragment4 f;
    load_matrices_transposed(f, address ^ (d * 32));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      multiply_add(rows.acc[b][2 * d], p[b][slot], f[0], f[1]);
      multiply_add(rows.acc[b][2 * d + 1], p[b][slot], f[2], f[3]);
    }
  }
}

// One step of the online softmax: s becomes p, and what was summed before shrinks. Lane 4 * g + t
// holds keys base + 8n + 2t, + 1 of s. A row sees keys (position - window, position]; kMasked is
// for tiles that some row does not see in full.
template <bool kMasked, int kHeadDim, int kBlocks>
__device__ __forceinline__ void softmax_step(Fragment4 (&p)[kBlocks][kTileSlots],
                                             float (&s)[kBlocks][kTileKeys / 8][4],
                                             Rows<kHeadDim, kBlocks>& rows,
                                             const int (&position)[kBlocks][2], int base,
                                             int window, float scale_log2) {
  constexpr int kColumns = kTileKeys / 8;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float keep[2];
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
        for (int i = 0; i < 4; ++i) rows.acc[b][n][i] = __fmul_rn(rows.acc[b][n][i], keep[i / 2]);
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

template <int kHeadDim>
__device__ __forceinline__ int count_row_tiles(const AttentionParams& p, int q_len) {
  if (q_len <= 0 || (q_len == 1 && p.group <= kMaxSplitRows)) return 0;
  constexpr int kTileRows = Sizes<kHeadDim>::kTileRows;
  return (q_len * p.group + kTileRows - 1) / kTileRows;
}

// The first key that a query at `position` sees.
__device__ __forceinline__ int first_visible(const AttentionParams& p, int position) {
  return p.window > 0 ? max(0, position - p.window + 1) : 0;
}

__device__ __forceinline__ int count_splits(const AttentionParams& p, int q_len, int seq_len) {
  if (q_len != 1 || p.group > kMaxSplitRows) return 0;
  const int first = first_visible(p, seq_len - 1) / kSplitKeys;
  return max(1, (seq_len + kSplitKeys - 1) / kSplitKeys - first);
}

enum class Work { kRowTiles, kSplits };

// Finds items of one kind. Items are numbered sequence by sequence, and within a sequence kv heads
// first, so that neighbours read the same blocks. All lanes call together.
template <Work kWork, int kHeadDim>
class WorkList {
 public:
  __device__ explicit WorkList(const AttentionParams& params) : p_(params) {}

  // `item` must not decrease from call to call. False when there are not so many.
  __device__ bool find(int item) {
    while (item >= end_item_) {
      if (first_seq_ + 32 >= p_.num_seqs) return false;
      load(first_seq_ + 32);
    }
    const int lane = __popc(__ballot_sync(kAllLanes, past_item_ <= item));
    seq = first_seq_ + lane;
    q_begin = __shfl_sync(kAllLanes, lane_q_begin_, lane);
    q_len = __shfl_sync(kAllLanes, lane_q_len_, lane);
    seq_len = __shfl_sync(kAllLanes, lane_seq_len_, lane);
    num_units = __shfl_sync(kAllLanes, lane_units_, lane);
    const int index = item - (__shfl_sync(kAllLanes, past_item_, lane) - num_units * p_.num_kv_heads);
    unit = index / p_.num_kv_heads;
    kv_head = index % p_.num_kv_heads;
    slot = first_seq_ / 32 * p_.slots_per_32_seqs + item - begin_item_;
    return true;
  }

  // Of the item found: its sequence, kv head, and which row tile or split of how many it is.
  int seq, q_begin, q_len, seq_len, kv_head, unit, num_units;
  int slot;             // for its part
  bool whole = false;   // splits: the one item of a kv head is all of its splits

 private:
  __device__ void load(int first_seq) {
    first_seq_ = first_seq;
    const int s = first_seq + lane_id();
    lane_q_begin_ = lane_q_len_ = lane_seq_len_ = lane_units_ = 0;
    if (s < p_.num_seqs) {
      lane_q_begin_ = __ldg(p_.cu_seqlens_q + s);
      lane_q_len_ = __ldg(p_.cu_seqlens_q + s + 1) - lane_q_begin_;
      lane_seq_len_ = __ldg(p_.seq_lens + s);
      lane_units_ = kWork == Work::kSplits ? count_splits(p_, lane_q_len_, lane_seq_len_)
                                           : count_row_tiles<kHeadDim>(p_, lane_q_len_);
    }
    if (kWork == Work::kSplits) {
      const int units = __reduce_add_sync(kAllLanes, lane_units_);
      whole = units * p_.num_kv_heads > p_.slots_per_32_seqs;
      if (whole) lane_units_ = min(lane_units_, 1);
    }
    begin_item_ = end_item_;
    past_item_ = lane_units_ * p_.num_kv_heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(kAllLanes, past_item_, step);
      if (lane_id() >= step) past_item_ += below;
    }
    past_item_ += begin_item_;
    end_item_ = __shfl_sync(kAllLanes, past_item_, 31);
  }

  const AttentionParams& p_;
  int first_seq_ = -32;  // of the 32 sequences in the lanes
  int lane_q_begin_, lane_q_len_, lane_seq_len_, lane_units_;
  int past_item_ = 0;                   // the items up to and with this lane's sequence
  int begin_item_ = 0, end_item_ = 0;  // of the 32
};

// A row of the block table, 32 entries of it in the lanes. Only entries [first, past) are read.
struct BlockTable {
  const int32_t* row;
  int first, past;
  int base = -32, entry;

  // The address of key `key`, a multiple of 16, in a cache. All lanes call together.
  template <int kHeadDim>
  __device__ __forceinline__ int64_t offset_of(const AttentionParams& p, int key, int kv_head) {
    const int block = key >> p.block_shift;
    if (static_cast<unsigned>(block - base) >= 32u) {
      base = block;
      const int i = base + lane_id();
      entry = i >= first && i < past ? __ldg(row + i) : 0;
    }
    const int64_t id = __shfl_sync(kAllLanes, entry, block - base);
    const int64_t token = (id << p.block_shift) + (key & ((1 << p.block_shift) - 1));
    return (token * p.num_kv_heads + kv_head) * kHeadDim;
  }
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
        work_(params) {}

  __device__ void run(int num_items) {
    __shared__ int next_item;
    const bool taking = num_items > static_cast<int>(gridDim.x);
    for (int item = blockIdx.x; item < num_items; item = next_item) {
      int taken = num_items;
      if (taking && threadIdx.x == 0) {
        taken = gridDim.x + static_cast<int>(atomicAdd(p_.counters + kNextRowTile, 1u));
      }
      work_.find(item);
      attend();
      __syncthreads();  // the stages are free, and so is next_item
      if (threadIdx.x == 0) next_item = taken;
      __syncthreads();
    }
  }

 private:
  __device__ void attend() {
    // The longest first: the last row tile sees most keys.
    const int first_row = (work_.num_units - 1 - work_.unit) * Size::kTileRows;
    const int last_row = min(first_row + Size::kTileRows, work_.q_len * p_.group) - 1;
    const int first_position = work_.seq_len - work_.q_len;
    first_key_ = first_visible(p_, first_position + first_row / p_.group);
    past_key_ = max(0, first_position + last_row / p_.group + 1);
    const int begin = first_key_ / kTileKeys, end = (past_key_ + kTileKeys - 1) / kTileKeys;
    table_ = {p_.block_tables + work_.seq * p_.table_stride, first_key_ >> p_.block_shift,
              (past_key_ + (1 << p_.block_shift) - 1) >> p_.block_shift};

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
    const int highest = warp_row > last_row
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
      const bool seen = base <= highest && (p_.window <= 0 || base + kTileKeys > lowest - p_.window + 1);
      if (seen) {
        const bool masked = base + kTileKeys - 1 > lowest ||
                            (p_.window > 0 && base <= highest - p_.window);
        attend_tile(rows, q, position, stages_ + stage * 2 * Size::kTileBytes, base, masked);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if ((tile + 1) % (kSplitKeys / kTileKeys) == 0 && tile + 1 < end) {
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
      const int64_t token = work_.q_begin + at / p_.group;
      const int head = work_.kv_head * p_.group + at % p_.group;
      copy_16_async(to + row * Size::kRowBytes + ((chunk ^ (row % 8)) * 16),
                    p_.q + token * p_.q_stride + head * kHeadDim + chunk * 8,
                    first_row + row <= last_row);
    }
  }

  __device__ void copy_tile(int tile, int stage) {
    constexpr int kRows = kThreads / Size::kChunks;  // at a time: a divisor of 16
    const int chunk = threadIdx.x % Size::kChunks;
    const uint32_t to = stages_ + stage * 2 * Size::kTileBytes;
    const int64_t token_stride = static_cast<int64_t>(p_.num_kv_heads) * kHeadDim;
#pragma unroll
    for (int i = 0; i < kTileKeys / kRows; ++i) {
      const int row = threadIdx.x / Size::kChunks + i * kRows;
      const int key = tile * kTileKeys + row, slot = tile * kTileKeys + i * kRows / kSlotRows * kSlotRows;
      const int64_t at = table_.offset_of<kHeadDim>(p_, slot, work_.kv_head) +
                         (key - slot) * token_stride + chunk * 8;
      const bool valid = key >= first_key_ && key < past_key_;
      const uint32_t place = to + row * Size::kRowBytes + ((chunk ^ (row % 8)) * 16);
      copy_16_async(place, p_.k_cache + at, valid);
      copy_16_async(place + Size::kTileBytes, p_.v_cache + at, valid);
    }
  }

  __device__ __forceinline__ void attend_tile(Rows<kHeadDim, kBlocks>& rows,
                                              const QueryFragments<kHeadDim, kBlocks>& q,
                                              const int (&position)[kBlocks][2], uint32_t stage,
                                              int base, bool masked) {
    float s[kBlocks][kTileKeys / 8][4];
#pragma unroll
    for (int i = 0; i < kTileSlots; ++i) {
      score_keys<kHeadDim, kBlocks>(s, i, q, stage + i * Size::kSlotBytes);
    }
    Fragment4 p[kBlocks][kTileSlots];
    if (masked) {
      softmax_step<true>(p, s, rows, position, base, p_.window, p_.scale_log2);
    } else {
      softmax_step<false>(p, s, rows, position, base, p_.window, p_.scale_log2);
    }
#pragma unroll
    for (int i = 0; i < kTileSlots; ++i) {
      add_values<kHeadDim, kBlocks>(rows, p, i, stage + Size::kTileBytes + i * Size::kSlotBytes);
    }
  }

  // rows = total + rows. The total of acc lies in shared memory, four floats of every thread in turn.
  __device__ __forceinline__ void add_to_total(Rows<kHeadDim, kBlocks>& rows) {
    rows.sum_lanes();
    if (!has_total_) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const Merge merge[2] = {{total_max_[b][0], rows.max[b][0]}, {total_max_[b][1], rows.max[b][1]}};
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float4 total = totals_[(b * (kHeadDim / 8) + n) * kThreads];
        float(&acc)[4] = rows.acc[b][n];
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
        const float(&acc)[4] = rows.acc[b][n];
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
        const int64_t token = work_.q_begin + row / p_.group;
        const int head = work_.kv_head * p_.group + row % p_.group;
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
  WorkList<Work::kRowTiles, kHeadDim> work_;
  BlockTable table_;
  int first_key_, past_key_;  // of the item
  bool has_total_;
  float total_max_[kBlocks][2], total_sum_[kBlocks][2];
};

// ---- Splits -------------------------------------------------------------------------------------

// What the consumer must know of an item; lies beside the slot with its q.
struct alignas(16) SplitItem {
  int token;  // -1: the stream ends here
  int seq, kv_head;
  int position;    // of the query
  int begin, end;  // keys; begin is that of a tile
  int num_parts, slot, first_slot;
};

// Writes the stream of a warp into its ring: for each item q, then the k and v of each of its tiles.
template <int kHeadDim>
class SplitProducer {
  using Size = Sizes<kHeadDim>;

 public:
  __device__ SplitProducer(const AttentionParams& params, uint32_t ring, SplitItem* items,
                           bool taking)
      : p_(params),
        ring_(ring),
        items_(items),
        taking_(taking),
        num_warps_(gridDim.x * kWarps),
        next_item_(threadIdx.x / 32 * gridDim.x + blockIdx.x),  // neighbours on different SMs
        work_(params) {}

  // Fills the next slot, in a group of copies of its own.
  __device__ __forceinline__ void step() {
    const uint32_t to = ring_ + slot_ * Size::kSlotBytes;
    if (next_ == Next::kItem) {
      open_item(to);
    } else if (next_ != Next::kNothing) {
      const int64_t at = table_.offset_of<kHeadDim>(p_, key_, kv_head_);
      copy_rows(to, (next_ == Next::kKeys ? p_.k_cache : p_.v_cache) + at,
                static_cast<int64_t>(p_.num_kv_heads) * kHeadDim, first_key_ - key_,
                past_key_ - key_);
      key_ += kSlotRows;
      if (key_ >= min(tile_ + kTileKeys, past_key_)) {
        if (next_ == Next::kKeys) {
          next_ = Next::kValues;
        } else {
          tile_ += kTileKeys;
          next_ = tile_ < past_key_ ? Next::kKeys : Next::kItem;
        }
        key_ = tile_;
      }
    }
    commit_copies();
    slot_ = slot_ + 1 == Size::kRing ? 0 : slot_ + 1;
  }

 private:
  enum class Next { kItem, kKeys, kValues, kNothing };

  __device__ void open_item(uint32_t to) {
    SplitItem item{.token = -1};
    if (next_item_ >= 0 && work_.find(next_item_)) {
      item.token = work_.q_begin;
      item.seq = work_.seq;
      item.kv_head = kv_head_ = work_.kv_head;
      item.position = work_.seq_len - 1;
      item.num_parts = work_.num_units;
      item.slot = work_.slot;
      item.first_slot = work_.slot - work_.unit * p_.num_kv_heads;
      first_key_ = first_visible(p_, item.position);
      const int split = first_key_ / kSplitKeys + work_.unit;
      item.begin = max(split * kSplitKeys, first_key_ / kTileKeys * kTileKeys);
      item.end = work_.whole ? work_.seq_len : min((split + 1) * kSplitKeys, work_.seq_len);
      past_key_ = item.end;
      tile_ = key_ = item.begin;
      next_ = tile_ < past_key_ ? Next::kKeys : Next::kItem;
      table_ = {p_.block_tables + item.seq * p_.table_stride, first_key_ >> p_.block_shift,
                (past_key_ + (1 << p_.block_shift) - 1) >> p_.block_shift};
      copy_rows(to, p_.q + item.token * p_.q_stride + item.kv_head * p_.group * kHeadDim, kHeadDim, 0,
                p_.group);
      int taken = -1;
      if (taking_ && lane_id() == 0) {
        taken = num_warps_ + static_cast<int>(atomicAdd(p_.counters + kNextSplit, 1u));
      }
      next_item_ = __shfl_sync(kAllLanes, taken, 0);
    } else {
      next_ = Next::kNothing;
    }
    if (lane_id() == 0) items_[slot_] = item;
  }

  // 16 rows; rows outside [first, past) become zeros and are not read.
  __device__ __forceinline__ void copy_rows(uint32_t to, const __nv_bfloat16* from,
                                            int64_t row_stride, int first, int past) {
    constexpr int kRows = 32 / Size::kChunks;  // at a time
    const int chunk = lane_id() % Size::kChunks;
#pragma unroll
    for (int i = 0; i < kSlotRows / kRows; ++i) {
      const int row = lane_id() / Size::kChunks + i * kRows;
      copy_16_async(to + row * Size::kRowBytes + ((chunk ^ (row % 8)) * 16),
                    from + row * row_stride + chunk * 8, row >= first && row < past);
    }
  }

  const AttentionParams& p_;
  const uint32_t ring_;
  SplitItem* const items_;
  const bool taking_;
  const int num_warps_;
  int next_item_;  // -1: none
  WorkList<Work::kSplits, kHeadDim> work_;
  BlockTable table_;
  Next next_ = Next::kItem;
  int slot_ = 0;
  int kv_head_, first_key_, past_key_, tile_, key_;  // of the item, and where it is
};

template <int kHeadDim>
class Splits {
  using Size = Sizes<kHeadDim>;

 public:
  __device__ Splits(const AttentionParams& params, uint32_t ring, SplitItem* items, bool taking)
      : p_(params), ring_(ring), items_(items), producer_(params, ring, items, taking) {}

  __device__ void run() {
    for (int i = 0; i < Size::kRing - 1; ++i) producer_.step();
    for (;;) {
      const int opened = slot_;
      const uint32_t queries = next_slot();
      const SplitItem item = items_[opened];
      if (item.token < 0) break;
      attend(item, queries);
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

  __device__ void attend(const SplitItem& item, uint32_t queries) {
    QueryFragments<kHeadDim, 1> q;
    load_queries<kHeadDim>(q[0], queries);
    const int position[1][2] = {{item.position, item.position}};
    Rows<kHeadDim, 1> rows, total;
    rows.reset();
    total.reset();
    for (int base = item.begin; base < item.end; base += kTileKeys) {
      const int slots = min(kTileSlots, (item.end - base + kSlotRows - 1) / kSlotRows);
      float s[1][kTileKeys / 8][4] = {};
#pragma unroll
      for (int i = 0; i < kTileSlots; ++i) {
        if (i < slots) score_keys<kHeadDim, 1>(s, i, q, next_slot());
      }
      Fragment4 p[1][kTileSlots];
      if (base + kTileKeys > item.end ||
          (p_.window > 0 && base <= item.position - p_.window)) {
        softmax_step<true>(p, s, rows, position, base, p_.window, p_.scale_log2);
      } else {
        softmax_step<false>(p, s, rows, position, base, p_.window, p_.scale_log2);
      }
#pragma unroll
      for (int i = 0; i < kTileSlots; ++i) {
        if (i < slots) add_values<kHeadDim, 1>(rows, p, i, next_slot());
      }
      if ((base + kTileKeys) % kSplitKeys == 0 && base + kTileKeys < item.end) {
        rows.sum_lanes();
        merge_into(total, rows);
        rows.reset();
      }
    }
    rows.sum_lanes();
    if (item.num_parts > 1) {
      store_part(item, rows);
      if (is_last_part(item)) combine_parts(item);
    } else {
      merge_into(total, rows);
      store_rows(item, total);
    }
  }

  __device__ __forceinline__ void merge_into(Rows<kHeadDim, 1>& total,
                                             const Rows<kHeadDim, 1>& part) {
    const Merge merge[2] = {{total.max[0][0], part.max[0][0]}, {total.max[0][1], part.max[0][1]}};
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total.acc[0][n][i] = merge[i / 2](total.acc[0][n][i], part.acc[0][n][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total.sum[0][h] = merge[h](total.sum[0][h], part.sum[0][h]);
      total.max[0][h] = merge[h].max;
    }
  }

  __device__ __nv_bfloat16* out_row(const SplitItem& item, int row) const {
    return p_.out + item.token * p_.out_stride + (item.kv_head * p_.group + row) * kHeadDim;
  }

  __device__ __forceinline__ void store_rows(const SplitItem& item, const Rows<kHeadDim, 1>& rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_id() / 4 + h * 8;
      if (row >= p_.group) continue;
      const float inverse_sum = inverse(rows.sum[0][h]);
      auto* out = reinterpret_cast<uint32_t*>(out_row(item, row)) + lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        out[n * 4] = finish(rows.acc[0][n][2 * h], rows.acc[0][n][2 * h + 1], inverse_sum);
      }
    }
  }

  __device__ __forceinline__ void store_part(const SplitItem& item, const Rows<kHeadDim, 1>& rows) {
    float* part = p_.parts + static_cast<int64_t>(item.slot) * p_.part_floats;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_id() / 4 + h * 8;
      if (row >= p_.group) continue;
      auto* acc = reinterpret_cast<float2*>(part + row * kHeadDim) + lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        acc[n * 4] = {rows.acc[0][n][2 * h], rows.acc[0][n][2 * h + 1]};
      }
      if (lane_id() % 4 == 0) {
        reinterpret_cast<float2*>(part + p_.group * kHeadDim)[row] = {rows.max[0][h],
                                                                     rows.sum[0][h]};
      }
    }
  }

  // True in the warp that finishes the last part of a sequence and kv head; it sees all parts.
  __device__ __forceinline__ bool is_last_part(const SplitItem& item) {
    __threadfence();  // the parts before the count
    __syncwarp();
    bool last = false;
    if (lane_id() == 0) {
      uint32_t* counter =
          p_.counters + kFirstPartCounter + item.seq * p_.num_kv_heads + item.kv_head;
      last = atomicAdd(counter, 1u) == static_cast<uint32_t>(item.num_parts) - 1;
      if (last) *counter = 0;
    }
    last = __shfl_sync(kAllLanes, last, 0);
    if (last) __threadfence();
    return last;
  }

  // Merges parts in ascending order, four columns a lane, kAhead parts loaded at a time.
  __device__ void combine_parts(const SplitItem& item) {
    constexpr int kAhead = 8;
    const int64_t stride = static_cast<int64_t>(p_.num_kv_heads) * p_.part_floats;
    const float* parts = p_.parts + static_cast<int64_t>(item.first_slot) * p_.part_floats;
    for (int i = lane_id() * 4; i < p_.group * kHeadDim; i += 32 * 4) {
      const int row = i / kHeadDim;
      const float* acc = parts + i;
      const float* max_sum = parts + p_.group * kHeadDim + row * 2;
      float4 total{};
      float total_max = kNone, total_sum = 0.0f;
      for (int first = 0; first < item.num_parts; first += kAhead) {
        float4 part[kAhead];
        float2 part_max_sum[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (first + j >= item.num_parts) break;
          part[j] = __ldcg(reinterpret_cast<const float4*>(acc + (first + j) * stride));
          part_max_sum[j] = __ldcg(reinterpret_cast<const float2*>(max_sum + (first + j) * stride));
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (first + j >= item.num_parts) break;
          const Merge merge(total_max, part_max_sum[j].x);
          total = {merge(total.x, part[j].x), merge(total.y, part[j].y), merge(total.z, part[j].z),
                   merge(total.w, part[j].w)};
          total_sum = merge(total_sum, part_max_sum[j].y);
          total_max = merge.max;
        }
      }
      const float inverse_sum = inverse(total_sum);
      *reinterpret_cast<uint2*>(out_row(item, row) + i % kHeadDim) = {
          finish(total.x, total.y, inverse_sum), finish(total.z, total.w, inverse_sum)};
    }
  }

  const AttentionParams& p_;
  const uint32_t ring_;
  SplitItem* const items_;
  int slot_ = 0;
  SplitProducer<kHeadDim> producer_;
};

// ---- Kernel and launcher ------------------------------------------------------------------------

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    paged_attention_kernel(const __grid_constant__ AttentionParams p) {
  using Size = Sizes<kHeadDim>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ SplitItem items[kWarps][Size::kRing];
  wait_for_previous_kernels();
  let_next_kernel_start();

  int row_tiles = 0, splits = 0;
  for (int s = lane_id(); s < p.num_seqs; s += 32) {
    const int q_len = __ldg(p.cu_seqlens_q + s + 1) - __ldg(p.cu_seqlens_q + s);
    row_tiles += count_row_tiles<kHeadDim>(p, q_len);
    splits += count_splits(p, q_len, __ldg(p.seq_lens + s));
  }
  row_tiles = __reduce_add_sync(kAllLanes, row_tiles) * p.num_kv_heads;
  splits = __reduce_add_sync(kAllLanes, splits) * p.num_kv_heads;
  const bool taking_splits = splits > static_cast<int>(gridDim.x) * kWarps;

  if (row_tiles > 0) {
    RowTiles<kHeadDim>(p, shared).run(row_tiles);
    __syncthreads();
  }
  if (splits > 0) {
    const int warp = threadIdx.x / 32;
    const uint32_t ring = shared_address(shared) + warp * Size::kRing * Size::kSlotBytes;
    Splits<kHeadDim>(p, ring, items[warp], taking_splits).run();
  }
  if (row_tiles > static_cast<int>(gridDim.x) || taking_splits) {
    __syncthreads();  // this block takes no more
    if (threadIdx.x == 0 && atomicAdd(p.counters + kBlocksDone, 1u) == gridDim.x - 1) {
      p.counters[kNextRowTile] = p.counters[kNextSplit] = p.counters[kBlocksDone] = 0;
    }
  }
}

template <int kHeadDim>
void launch(const AttentionParams& params, int64_t num_tokens, int64_t max_keys, Stream stream) {
  using Size = Sizes<kHeadDim>;
  const auto kernel = paged_attention_kernel<kHeadDim>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Size::kSharedBytes);
  // No more blocks than there can be items.
  const int64_t seqs = std::min<int64_t>(params.num_seqs, num_tokens);
  const int64_t row_tiles = seqs + num_tokens * params.group / Size::kTileRows;
  const int64_t splits = seqs * std::max<int64_t>(1, (max_keys + kSplitKeys - 1) / kSplitKeys);
  const int64_t blocks = std::min<int64_t>(2 * num_multiprocessors(),
                                           (row_tiles + splits) * params.num_kv_heads);
  kernel<<<static_cast<unsigned>(blocks), kThreads, Size::kSharedBytes, stream>>>(params);
  check_launch("paged_attention");
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("paged_attention: " + what);
}

bool aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (t.shape[0] <= 1 || t.strides[0] % 8 == 0);
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
  if (block_size < kSlotRows || (block_size & (block_size - 1)) != 0) {
    refuse("expected block_size a power of two from 16 on, got " + std::to_string(block_size));
  }
  if (!aligned(out) || !aligned(q) || !aligned(k_cache) || !aligned(v_cache)) {
    refuse("expected every token of out, q and the caches to begin at a multiple of 16 bytes");
  }
  if (num_tokens == 0 || num_seqs == 0 || group == 0) return;
  const Workspace& memory = workspace();
  if (kFirstPartCounter + num_seqs * num_kv_heads > static_cast<int64_t>(Workspace::kNumCounters)) {
    refuse("at most " + std::to_string(Workspace::kNumCounters - kFirstPartCounter) +
           " sequences times kv heads, got " + std::to_string(num_seqs * num_kv_heads));
  }
  const int64_t part_floats = (group * (head_dim + 2) + 3) / 4 * 4;
  const int64_t slots = static_cast<int64_t>(Workspace::kScratchBytes / sizeof(float)) / part_floats;
  AttentionParams params{};
  params.out = out.ptr<__nv_bfloat16>();
  params.q = q.ptr<__nv_bfloat16>();
  params.k_cache = k_cache.ptr<__nv_bfloat16>();
  params.v_cache = v_cache.ptr<__nv_bfloat16>();
  params.block_tables = block_tables.ptr<int32_t>();
  params.cu_seqlens_q = cu_seqlens_q.ptr<int32_t>();
  params.seq_lens = seq_lens.ptr<int32_t>();
  params.parts = static_cast<float*>(memory.scratch);
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
  params.slots_per_32_seqs = static_cast<int>(slots / ((num_seqs + 31) / 32));
  params.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  const int64_t max_keys = block_tables.shape[1] * block_size;
  head_dim == 64 ? launch<64>(params, num_tokens, max_keys, stream)
                 : launch<128>(params, num_tokens, max_keys, stream);
}

}  // namespace tinyvllm::cuda
