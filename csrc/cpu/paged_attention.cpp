// out[t,h] = sum over keys j of softmax(q[t,h] . k[j,h'] * softmax_scale)[j] * v[j,h'], where j
// runs over the keys that token t may see and h' = h / group is the kv head that its query head
// shares.
//
// Layout. k_cache and v_cache are [num_blocks, block_size, num_kv_heads, head_dim] bf16; key j of
// sequence s lies in block block_tables[s][j / block_size]. The keys are taken in tiles of 64,
// aligned to absolute positions, and four tiles make a split:
//
//   keys   0 ......... 63 | 64 ....... 127 | 128 ...... 191 | 192 ...... 255 | 256 ...
//          [ tile 0      ]  [ tile 1      ]  [ tile 2      ]  [ tile 3      ]  [ tile 4
//          [ split 0                                                        ]  [ split 1
//
// The queries of one kv head are rows: `group` rows for each token. A tile of keys is repacked once
// for all rows into the packed lines of simd.h, so that both products are `dot_tile`s:
//
//   scores [rows, 64]       = q [rows, head_dim]  x  K lines: 4 blocks of 16 keys, pairs of dims
//   acc    [rows, head_dim] = p [rows, 64]        x  V lines: blocks of 16 dims, pairs of keys
//
// Within a split a row carries a running maximum m, a sum l (16 partial sums, one for each lane)
// and acc (online softmax, in powers of two: the scores are scaled by log2(e)); p is rounded to
// bf16, and l sums the rounded values. The finished splits are merged in ascending order.
//
// A row's bits depend on the row alone, whether its prompt came whole, in chunks or token by token:
// tile and split boundaries are absolute; a tile that a row cannot see is skipped for that row; in
// a tile that it sees in part, a hidden key has p = 0, and adding 0 * v changes nothing (but the
// sign of a zero, which the last step normalizes; v is finite). Decode and prefill are the same
// code.
//
// Work. An item is up to 96 rows of one sequence, over all of their keys: the rows of some tokens
// and one kv head in a prompt, those of all kv heads in decode, where the cache is then read tile
// after tile, page after page. When there are too few items for the threads, the splits of an item
// are computed apart and merged afterwards: the same arithmetic in another place.
#ifdef TINYVLLM_ISA
#include "simd.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

// Where an item's rows live while its keys pass by.
struct Workspace {
  bf16_t* q;         // [rows, head_dim]
  uint32_t* k;       // [kTileKeys / 16, head_dim / 2, 16] lines
  uint32_t* v;       // [head_dim / 16, kTileKeys / 2, 16] lines
  bf16_t* p;         // [kRowTile, kTileKeys]
  float* scores;     // [kRowTile, kTileKeys]
  float* lane_sums;  // [rows, 16]
};

// Where the keys of a tile lie, for the item's first kv head: k[i], v[i] for i in [first, past).
struct TileRows {
  const bf16_t* k[kTileKeys];
  const bf16_t* v[kTileKeys];
  int64_t first, past;
};

// The keys [lo, hi) of the tile that starts at `base`.
void find_rows(const AttentionParams& a, const AttentionItem& item, int64_t base, int64_t lo,
               int64_t hi, TileRows& rows) {
  rows.first = lo - base;
  rows.past = hi - base;
  const int32_t* table = a.block_tables + item.seq * a.table_stride + lo / a.block_size;
  int64_t offset = lo % a.block_size;
  for (int64_t i = rows.first; i < rows.past; ++table, offset = 0) {
    const int64_t block = *table;
    const bf16_t* k = a.k_cache + block * a.k_strides[0] + offset * a.k_strides[1] +
                      item.kv_head * a.k_strides[2];
    const bf16_t* v = a.v_cache + block * a.v_strides[0] + offset * a.v_strides[1] +
                      item.kv_head * a.v_strides[2];
    const int64_t past = std::min(rows.past, i + a.block_size - offset);
    for (; i < past; ++i, k += a.k_strides[1], v += a.v_strides[1]) {
      rows.k[i] = k;
      rows.v[i] = v;
    }
  }
}

// Fetches the rows of the next tile, four cache lines a step. Keys lie all over the cache, so the
// processor sees no stream; and asking for a whole tile at once would stall until it is there.
struct FetchRows {
  static constexpr int64_t kLinesPerStep = 4;
  static constexpr int64_t kLineHalves = 32;

  const bf16_t* const* rows = nullptr;
  int64_t head_offset = 0;
  int line_shift = 0;               // 2^line_shift lines in a row
  int64_t line = 0, num_lines = 0;  // the next one of how many

  FetchRows() = default;
  FetchRows(const bf16_t* const* rows, int64_t num_rows, int64_t head_offset, int64_t head_dim)
      : rows(rows), head_offset(head_offset) {
    while ((kLineHalves << line_shift) * 2 <= head_dim) ++line_shift;
    num_lines = (num_rows << line_shift) / kLinesPerStep * kLinesPerStep;
  }

  TINYVLLM_INLINE void operator()(int64_t step) const {
    const int64_t begin = line + step * kLinesPerStep;
    if (begin >= num_lines) return;
#pragma GCC unroll 4
    for (int64_t i = begin; i < begin + kLinesPerStep; ++i) {
      const int64_t in_row = i & ((int64_t{1} << line_shift) - 1);
      prefetch_l2(rows[i >> line_shift] + head_offset + in_row * kLineHalves);
    }
  }
  void advance(int64_t steps) { line += steps * kLinesPerStep; }
};

// Packs a tile's keys and values of kv head item.kv_head + head. What is not in `rows` becomes
// zeros and is not read.
void pack_tile(const AttentionParams& a, const TileRows& rows, int64_t head, int64_t key_blocks,
               const Workspace& w) {
  alignas(64) static constexpr bf16_t kZeros[kMaxHeadDim] = {};
  const int64_t head_dim = a.head_dim;
  const int64_t k_head = head * a.k_strides[2], v_head = head * a.v_strides[2];
  for (int64_t b = 0; b < key_blocks; ++b) {
    const bf16_t* lines[kLineRows];
    for (int64_t i = 0; i < kLineRows; ++i) {
      const int64_t key = b * kLineRows + i;
      lines[i] = key >= rows.first && key < rows.past ? rows.k[key] + k_head : kZeros;
    }
    pack_lines(w.k + b * (head_dim / 2) * kLineWords, lines, head_dim / 2);
  }
  for (int64_t key = 0; key < key_blocks * kLineRows; key += 2) {
    const bf16_t* even = key >= rows.first && key < rows.past ? rows.v[key] + v_head : kZeros;
    const bf16_t* odd =
        key + 1 >= rows.first && key + 1 < rows.past ? rows.v[key + 1] + v_head : kZeros;
    uint32_t* lines = w.v + key / 2 * kLineWords;
    for (int64_t d = 0; d < head_dim; d += kLineRows) {
      interleave16(lines + d * (kTileKeys / 2), even + d, odd + d);
    }
  }
}

// scores[r][16 * b + i] = q[r] . K[16 * b + i] for kBlocks blocks of 16 keys from block b.
template <int kBlocks, int kRows>
TINYVLLM_INLINE void score_blocks(const AttentionParams& a, const Workspace& w, int64_t row,
                                  int64_t b, const FetchRows& ahead) {
  const int64_t k_words = a.head_dim / 2 * kLineWords;
  F16 acc[kRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) acc[r][i] = zero16();
  }
  dot_tile<kBlocks, kRows>(acc, w.k + b * k_words, k_words, w.q + row * a.head_dim, a.head_dim,
                           a.head_dim / 2, ahead);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
      store16(w.scores + r * kTileKeys + (b + i) * kLineRows, acc[r][i]);
    }
  }
}

// out[r] = out[r] * shrink[r] + p[r] x V for kBlocks blocks of 16 dims from d.
template <int kBlocks, int kRows>
TINYVLLM_INLINE void add_values(const AttentionParams& a, const Workspace& w, float* out,
                                const float* shrink, int64_t d, int64_t pairs,
                                const FetchRows& ahead) {
  const int64_t v_words = kTileKeys / 2 * kLineWords;
  F16 acc[kRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
      acc[r][i] = mul(load16(out + r * a.head_dim + d + i * kLineRows), set16(shrink[r]));
    }
  }
  dot_tile<kBlocks, kRows>(acc, w.v + d / kLineRows * v_words, v_words, w.p, kTileKeys, pairs,
                           ahead);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
      store16(out + r * a.head_dim + d + i * kLineRows, acc[r][i]);
    }
  }
}

// The online softmax of one row and tile: scores become p, *max_of_row is raised if need be.
// Returns the sum of p in 16 lanes.
template <int kKeyBlocks>
TINYVLLM_INLINE F16 softmax_row(const AttentionParams& a, const Workspace& w, int64_t r,
                                int64_t base, int64_t position, float* max_of_row) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  F16 s[kKeyBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kKeyBlocks; ++b) {
    s[b] = mul(load16(w.scores + r * kTileKeys + b * kLineRows), set16(a.scale_log2));
  }
  const int64_t first_key = a.window > 0 ? position - a.window + 1 : 0;
  if (base < first_key || base + kKeyBlocks * kLineRows - 1 > position) {
#pragma GCC unroll 4
    for (int b = 0; b < kKeyBlocks; ++b) {
      const int64_t first = base + b * kLineRows;
      s[b] = keep_lanes(s[b], first_key - first, position + 1 - first, kHidden);
    }
  }
  F16 largest = max(s[0], s[1]);
  if constexpr (kKeyBlocks == 4) largest = max(largest, max(s[2], s[3]));
  const float m = std::max(reduce_max(largest), *max_of_row);
  *max_of_row = m;
#pragma GCC unroll 4
  for (int b = 0; b < kKeyBlocks; ++b) {
    s[b] = round_and_store16_bf16(w.p + r * kTileKeys + b * kLineRows,
                                  exp2_nonpositive(sub(s[b], set16(m))));
  }
  F16 sum = add(s[0], s[1]);
  if constexpr (kKeyBlocks == 4) sum = add(sum, add(s[2], s[3]));
  return sum;
}

// kRows rows from `row` against the packed tile, of which the first kKeyBlocks blocks are in use.
template <int kRows, int kKeyBlocks>
TINYVLLM_INLINE void attend_tile(const AttentionParams& a, const AttentionItem& item,
                                 const Workspace& w, const RowState& state, int64_t row,
                                 int64_t base, FetchRows next_k, FetchRows next_v) {
  // With few rows, more blocks at a time keep enough independent chains going.
  constexpr int kBlocks = kRows <= 4 ? 4 : 2;
  constexpr int kScoreBlocks = std::min(kBlocks, kKeyBlocks);
  for (int64_t b = 0; b < kKeyBlocks; b += kScoreBlocks) {
    score_blocks<kScoreBlocks, kRows>(a, w, row, b, next_k);
    next_k.advance(a.head_dim / 2);
  }
  alignas(64) float shrink[kLineRows] = {};
  F16 sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t position = item.position + (row + r) / a.group % item.tokens;
    const float before = state.max[row + r];
    sums[r] = softmax_row<kKeyBlocks>(a, w, r, base, position, state.max + row + r);
    shrink[r] = before - state.max[row + r];
  }
  store16(shrink, exp2_nonpositive(load16(shrink)));
  for (int r = 0; r < kRows; ++r) {
    float* lane_sums = w.lane_sums + (row + r) * kLineRows;
    store16(lane_sums, fma(load16(lane_sums), set16(shrink[r]), sums[r]));
  }
  float* out = state.acc + row * a.head_dim;
  constexpr int64_t kPairs = kKeyBlocks * kLineRows / 2;
  int64_t d = 0;
  for (; d + kBlocks * kLineRows <= a.head_dim; d += kBlocks * kLineRows) {
    add_values<kBlocks, kRows>(a, w, out, shrink, d, kPairs, next_v);
    next_v.advance(kPairs);
  }
  for (; d < a.head_dim; d += kLineRows) {
    add_values<1, kRows>(a, w, out, shrink, d, kPairs, next_v);
    next_v.advance(kPairs);
  }
}

template <int kRows>
void attend_rows(const AttentionParams& a, const AttentionItem& item, const Workspace& w,
                 const RowState& state, int64_t row, int64_t base, int64_t key_blocks,
                 const FetchRows& next_k, const FetchRows& next_v) {
  if (key_blocks == 2) {
    attend_tile<kRows, 2>(a, item, w, state, row, base, next_k, next_v);
  } else {
    attend_tile<kRows, 4>(a, item, w, state, row, base, next_k, next_v);
  }
}

using AttendFunction = void (*)(const AttentionParams&, const AttentionItem&, const Workspace&,
                                const RowState&, int64_t, int64_t, int64_t, const FetchRows&,
                                const FetchRows&);
constexpr AttendFunction kAttendRows[kRowTile + 1] = {
    nullptr,        attend_rows<1>, attend_rows<2>, attend_rows<3>, attend_rows<4>,
    attend_rows<5>, attend_rows<6>, attend_rows<7>, attend_rows<8>,
};

// All rows of an item against one split of the keys. A row that sees no key of the split ends with
// max = -inf.
void attend_split(const AttentionParams& a, const AttentionItem& item, int64_t split,
                  const Workspace& w, const RowState& state) {
  const int64_t rows = num_rows(a, item), head_rows = item.tokens * a.group;
  std::fill_n(state.max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(state.acc, rows * a.head_dim, 0.0f);
  std::fill_n(w.lane_sums, rows * kLineRows, 0.0f);
  const int64_t past = item.position + item.tokens;  // the last row sees the keys before it
  const int64_t first_key = a.window > 0 ? std::max<int64_t>(0, item.position - a.window + 1) : 0;
  for (int64_t base = split * kSplitKeys; base < std::min((split + 1) * kSplitKeys, past);
       base += kTileKeys) {
    const int64_t lo = std::max(base, first_key), hi = std::min(base + kTileKeys, past);
    if (lo >= hi) continue;
    const int64_t key_blocks = hi - base > kTileKeys / 2 ? 4 : 2;
    // The tokens that see a key of this tile: they come after its first key, and the window of the
    // last of them still reaches its last.
    const int64_t first_token = std::max<int64_t>(0, base - item.position);
    const int64_t past_token =
        a.window > 0 ? std::min(item.tokens, base + kTileKeys - 1 + a.window - item.position)
                     : item.tokens;
    TileRows tile, next;
    find_rows(a, item, base, lo, hi, tile);
    find_rows(a, item, hi, hi, std::min(hi + kTileKeys, past), next);
    for (int64_t head = 0; head < item.kv_heads; ++head) {
      pack_tile(a, tile, head, key_blocks, w);
      // The first rows fetch the head's next tile.
      FetchRows next_k(next.k, next.past, head * a.k_strides[2], a.head_dim);
      FetchRows next_v(next.v, next.past, head * a.v_strides[2], a.head_dim);
      const int64_t past_row = head * head_rows + past_token * a.group;
      for (int64_t row = head * head_rows + first_token * a.group; row < past_row;) {
        const int64_t n = std::min<int64_t>(kRowTile, past_row - row);
        kAttendRows[n](a, item, w, state, row, base, key_blocks, next_k, next_v);
        next_k = next_v = FetchRows();
        row += n;
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    state.sum[row] = reduce_add(load16(w.lane_sums + row * kLineRows));
  }
}

// Adds a finished split to the total of the splits before it.
void merge_split(const AttentionParams& a, const AttentionItem& item, const RowState& total,
                 const RowState& split) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < num_rows(a, item); ++row) {
    if (split.max[row] == kNone) continue;
    float* acc = total.acc + row * a.head_dim;
    const float* add_acc = split.acc + row * a.head_dim;
    if (total.max[row] == kNone) {
      total.max[row] = split.max[row];
      total.sum[row] = split.sum[row];
      std::copy_n(add_acc, a.head_dim, acc);
      continue;
    }
    const float m = std::max(total.max[row], split.max[row]);
    const F16 keep = exp2_nonpositive(set16(total.max[row] - m));
    const F16 take = exp2_nonpositive(set16(split.max[row] - m));
    for (int64_t d = 0; d < a.head_dim; d += kLineRows) {
      store16(acc + d, fma(load16(add_acc + d), take, mul(load16(acc + d), keep)));
    }
    const F16 sum = fma(set16(split.sum[row]), take, mul(set16(total.sum[row]), keep));
    total.max[row] = m;
    total.sum[row] = first_lane(sum);
  }
}

// Divides by the sums and stores. A row that saw nothing (a negative position) becomes zeros.
void store_rows(const AttentionParams& a, const AttentionItem& item, const RowState& total) {
  for (int64_t row = 0; row < num_rows(a, item); ++row) {
    const bool empty = total.max[row] == -std::numeric_limits<float>::infinity();
    const F16 scale = set16(empty ? 0.0f : 1.0f / total.sum[row]);
    bf16_t* out = a.out + row_offset(a, item, row, a.out_strides);
    for (int64_t d = 0; d < a.head_dim; d += kLineRows) {
      store16_bf16(out + d, fma(load16(total.acc + row * a.head_dim + d), scale, zero16()));
    }
  }
}

Workspace make_workspace(const AttentionParams& a, const AttentionItem& item, char*& memory) {
  const int64_t rows = num_rows(a, item);
  const Workspace w{
      .q = take<bf16_t>(memory, rows * a.head_dim),
      .k = take<uint32_t>(memory, kTileKeys * a.head_dim / 2),
      .v = take<uint32_t>(memory, kTileKeys * a.head_dim / 2),
      .p = take<bf16_t>(memory, kRowTile * kTileKeys),
      .scores = take<float>(memory, kRowTile * kTileKeys),
      .lane_sums = take<float>(memory, rows * kLineRows),
  };
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(a.q + row_offset(a, item, row, a.q_strides), a.head_dim, w.q + row * a.head_dim);
  }
  return w;
}

// Items [begin, end), each with all of its splits.
void attend_items(const AttentionParams& a, const AttentionItem* items, Scratch& scratch,
                  int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const AttentionItem& item = items[i];
    const int64_t rows = num_rows(a, item);
    char* memory = static_cast<char*>(scratch.get(workspace_bytes(a, rows)));
    const RowState total = take_rows(a, memory, rows), part = take_rows(a, memory, rows);
    const Workspace w = make_workspace(a, item, memory);
    std::fill_n(total.max, rows, -std::numeric_limits<float>::infinity());
    for (int64_t split = item.first_split; split < item.past_split; ++split) {
      attend_split(a, item, split, w, part);
      merge_split(a, item, total, part);
    }
    store_rows(a, item, total);
  }
}

// One split of one item, into its own row state.
void attend_part(const AttentionParams& a, const AttentionItem& item, int64_t split,
                 Scratch& scratch, const RowState& part) {
  char* memory = static_cast<char*>(scratch.get(workspace_bytes(a, num_rows(a, item))));
  attend_split(a, item, split, make_workspace(a, item, memory), part);
}

// The splits of one item, computed apart, into the first of them and from there to `out`.
void merge_parts(const AttentionParams& a, const AttentionItem& item, const RowState* parts) {
  for (int64_t i = 1; i < item.past_split - item.first_split; ++i) {
    merge_split(a, item, parts[0], parts[i]);
  }
  store_rows(a, item, parts[0]);
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "../ops.h"
#include "isa.h"
#include "scratch.h"
#include "simd.h"
#include "thread_pool.h"

namespace tinyvllm::cpu {
namespace {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kSplitKeys = 256;
constexpr int kRowTile = 8;
constexpr int64_t kMaxItemRows = 96;  // their q and acc stay in the first-level caches
constexpr int64_t kMaxHeadDim = 256;

// Splits are computed apart below this many items for each thread, and if the row states of all of
// them fit this many floats.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kMaxPartFloats = int64_t{4} << 20;

struct AttentionParams {
  bf16_t* out;                  // [num_tokens, num_heads, head_dim]
  const bf16_t* q;              // [num_tokens, num_heads, head_dim]
  const bf16_t* k_cache;        // [num_blocks, block_size, num_kv_heads, head_dim]
  const bf16_t* v_cache;        // the same
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t out_strides[2], q_strides[2], k_strides[3], v_strides[3], table_stride;
  int64_t group, head_dim, block_size;
  int64_t window;    // <= 0: none
  float scale_log2;  // softmax_scale * log2(e)
};

struct AttentionItem {
  int64_t seq;
  int64_t kv_head, kv_heads;  // the first, and how many
  int64_t token, tokens;      // in q and out
  int64_t position;           // of the first token
  int64_t first_split, past_split;
};

// An item's rows: [kv_heads, tokens, group].
int64_t num_rows(const AttentionParams& a, const AttentionItem& item) {
  return item.kv_heads * item.tokens * a.group;
}

// Where a row lies in q or out.
int64_t row_offset(const AttentionParams& a, const AttentionItem& item, int64_t row,
                   const int64_t (&strides)[2]) {
  const int64_t token = row / a.group % item.tokens, kv_head = row / (a.group * item.tokens);
  return (item.token + token) * strides[0] +
         ((item.kv_head + kv_head) * a.group + row % a.group) * strides[1];
}

// What the online softmax has summed up, for each row.
struct RowState {
  float* max;  // [rows] in units of log2
  float* sum;  // [rows]
  float* acc;  // [rows, head_dim]
};

// Cuts n values off the front of `memory`, in whole cache lines.
template <typename T>
T* take(char*& memory, int64_t n) {
  T* taken = reinterpret_cast<T*>(memory);
  const int64_t align = Scratch::kAlign;
  memory += (n * static_cast<int64_t>(sizeof(T)) + align - 1) / align * align;
  return taken;
}

RowState take_rows(const AttentionParams& a, char*& memory, int64_t rows) {
  return {take<float>(memory, rows), take<float>(memory, rows),
          take<float>(memory, rows * a.head_dim)};
}

int64_t row_state_floats(const AttentionParams& a, int64_t rows) {
  return 2 * ((rows + 15) / 16 * 16) + rows * a.head_dim;
}

// Two row states and a Workspace.
size_t workspace_bytes(const AttentionParams& a, int64_t rows) {
  const int64_t floats = 2 * row_state_floats(a, rows) + kTileKeys * a.head_dim +
                         kRowTile * kTileKeys + rows * kLineRows;
  const int64_t halves = rows * a.head_dim + kRowTile * kTileKeys;
  return static_cast<size_t>(4 * floats + 2 * halves) + 8 * Scratch::kAlign;
}

thread_local Scratch t_scratch;
thread_local Scratch t_parts;
thread_local std::vector<AttentionItem> t_items;
thread_local std::vector<RowState> t_part_states;
thread_local std::vector<int64_t> t_part_items;

}  // namespace
}  // namespace tinyvllm::cpu

#define TINYVLLM_ISA_FILE "paged_attention.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {
namespace {

void list_items(const AttentionParams& a, int64_t num_seqs, int64_t num_kv_heads,
                const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                std::vector<AttentionItem>& items) {
  const int64_t item_tokens = std::max<int64_t>(1, kMaxItemRows / a.group);
  items.clear();
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t begin = cu_seqlens_q[seq], end = cu_seqlens_q[seq + 1];
    for (int64_t token = begin; token < end; token += item_tokens) {
      const int64_t tokens = std::min(item_tokens, end - token);
      const int64_t position = seq_lens[seq] - (end - token);
      const int64_t first_key = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
      const int64_t past_key = std::max<int64_t>(0, position + tokens);
      const int64_t item_heads = std::max<int64_t>(1, kMaxItemRows / (tokens * a.group));
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head += item_heads) {
        items.push_back({.seq = seq,
                         .kv_head = kv_head,
                         .kv_heads = std::min(item_heads, num_kv_heads - kv_head),
                         .token = token,
                         .tokens = tokens,
                         .position = position,
                         .first_split = first_key / kSplitKeys,
                         .past_split = std::max(first_key / kSplitKeys + 1,
                                                (past_key + kSplitKeys - 1) / kSplitKeys)});
      }
    }
  }
}

// Every split of every item gets a row state in `memory`; part_items[i] is the item of part i.
void list_parts(const AttentionParams& a, const std::vector<AttentionItem>& items, char* memory,
                std::vector<RowState>& states, std::vector<int64_t>& part_items) {
  states.clear();
  part_items.clear();
  for (size_t i = 0; i < items.size(); ++i) {
    for (int64_t split = items[i].first_split; split < items[i].past_split; ++split) {
      states.push_back(take_rows(a, memory, num_rows(a, items[i])));
      part_items.push_back(static_cast<int64_t>(i));
    }
  }
}

}  // namespace

void paged_attention(const Tensor& out, const Tensor& q, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_tables, const Tensor& cu_seqlens_q,
                     const Tensor& seq_lens, float softmax_scale, int sliding_window) {
  const int64_t num_kv_heads = k_cache.shape[2];
  const AttentionParams a{
      .out = out.ptr<bf16_t>(),
      .q = q.ptr<bf16_t>(),
      .k_cache = k_cache.ptr<bf16_t>(),
      .v_cache = v_cache.ptr<bf16_t>(),
      .block_tables = block_tables.ptr<int32_t>(),
      .out_strides = {out.strides[0], out.strides[1]},
      .q_strides = {q.strides[0], q.strides[1]},
      .k_strides = {k_cache.strides[0], k_cache.strides[1], k_cache.strides[2]},
      .v_strides = {v_cache.strides[0], v_cache.strides[1], v_cache.strides[2]},
      .table_stride = block_tables.strides[0],
      .group = q.shape[1] / num_kv_heads,
      .head_dim = q.shape[2],
      .block_size = k_cache.shape[1],
      .window = sliding_window,
      .scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634),
  };
  if (a.head_dim % kLineRows != 0 || a.head_dim > kMaxHeadDim) {
    throw std::invalid_argument("paged_attention: expected head_dim a multiple of 16 up to " +
                                std::to_string(kMaxHeadDim) + ", got " +
                                std::to_string(a.head_dim));
  }
  std::vector<AttentionItem>& items = t_items;
  list_items(a, seq_lens.shape[0], num_kv_heads, cu_seqlens_q.ptr<int32_t>(),
             seq_lens.ptr<int32_t>(), items);
  const int64_t num_items = static_cast<int64_t>(items.size());
  int64_t num_parts = 0, part_floats = 0;
  for (const AttentionItem& item : items) {
    const int64_t splits = item.past_split - item.first_split;
    num_parts += splits;
    part_floats += splits * row_state_floats(a, num_rows(a, item));
  }
  const int threads = num_threads();
  if (threads == 1 || num_items >= kItemsPerThread * threads || num_parts <= num_items ||
      part_floats > kMaxPartFloats) {
    const auto attend = TINYVLLM_DISPATCH(attend_items);
    const AttentionItem* first = items.data();
    parallel_for(num_items, 1,
                 [&](int64_t begin, int64_t end) { attend(a, first, t_scratch, begin, end); });
    return;
  }

  const auto attend = TINYVLLM_DISPATCH(attend_part);
  const auto merge = TINYVLLM_DISPATCH(merge_parts);
  std::vector<RowState>& states = t_part_states;
  std::vector<int64_t>& part_items = t_part_items;
  list_parts(a, items, static_cast<char*>(t_parts.get(part_floats * sizeof(float))), states,
             part_items);
  parallel_for(num_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first_part =
          std::lower_bound(part_items.begin(), part_items.end(), part_items[part]) -
          part_items.begin();
      const AttentionItem& item = items[part_items[part]];
      attend(a, item, item.first_split + part - first_part, t_scratch, states[part]);
    }
  });
  int64_t part = 0;
  for (const AttentionItem& item : items) {
    merge(a, item, states.data() + part);
    part += item.past_split - item.first_split;
  }
}

}  // namespace tinyvllm::cpu

#endif
