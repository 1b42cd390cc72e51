// out[t][n] = sum over k of x[t][k] * weight[n][k] for many tokens, and what follows it: a bias,
// the residual, or silu(gate) * up.
//
// Layout. The weight is what pack_linear makes (linear.cu): [strips][tiles of 32 inputs][16 rows]
// [4 octets swizzled][8] bf16. A tile's swizzle is the one that `wgmma` calls 64-byte, so tiles of
// neighbouring strips, put one after the other in shared memory, are an operand as they are.
//
// Mapping. A block makes tiles of kTokens tokens x kRows weight rows. Two threads ask the copy
// engine for K in steps of 64, one of them for the weight, without waiting for the kernels before;
// one warpgroup per 64 tokens multiplies:
//
//     x, packed --tensor copies--> [step][step][step]... --wgmma--> registers --> epilogue --> out
//       ^                             | free again
//       '-----------------------------'
//
// Ways of sharing the work, Mode:
//
//     kAlone        as many blocks as find room, each takes one tile after the other
//     kPair         for few tokens, which make few tiles: the two blocks of a cluster make one
//                   tile, each half of K, and send each other the sums that the other finishes
//     kShareWeight  the two blocks of a cluster make tiles of the same weight rows and of
//                   neighbouring tokens, and each copies half of the weight to both
//     kShareTokens  the other way round: the same tokens, neighbouring weight rows
//
// But for kPair, a tile of bf16 leaves through shared memory, from where the copy engine stores it
// while the next one is multiplied; what kAdd adds to comes through the ring, behind the last step
// of K.
//
// A kernel of 64 pairs leaves half of the multiprocessors to the next one, which fills its rings
// there: 64 of them draw as much from memory, and nearly as much from L2, as all do (NOTES.md).
//
// Order of summation. num_groups cuts K into one range or two, by the weight's shape alone. A range
// is summed from front to back, 16 inputs at a time, then the two are added. All modes and tiles
// keep to that, and so does gemm_portable_kernel, which runs before and after sm_90 and where x is
// not aligned (mma.sync and wgmma round alike, NOTES.md). So the bits of a row depend neither on
// the number of tokens nor on the other rows.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "device.h"
#include "gemm.h"
#include "tensor_cores.cuh"
#include "tensor_map.h"
#include "workspace.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kStripRows = 16;
constexpr int kTileK = 32;
constexpr int kTileBytes = kStripRows * kTileK * 2;
constexpr int kStepK = 64;  // 128 bytes of a token, two tiles of a strip
constexpr int kStepTiles = kStepK / kTileK;
constexpr int kMaxGroups = 2;  // ranges of K

enum class Mode { kAlone, kPair, kShareWeight, kShareTokens };

struct KernelParams {
  // [t][k], boxes of 64 inputs, 128-byte swizzle: of all tokens of a tile (kShareTokens: of half of
  // them), and of those that the last tile has. Boxes that reach beyond x are slow.
  CUtensorMap x_map, x_tail_map;
  CUtensorMap out_map;  // [t][n], boxes of 64 x 64, 128-byte swizzle
  CUtensorMap w_map;    // [tiles][strips][1 KiB], boxes of whole tiles
  GemmParams gemm;
  int strips, tiles, steps, groups;
  int token_tiles, row_tiles;  // of kShareWeight and kShareTokens: twos of them
  int band;                    // token tiles that are made with the same weight rows
  int x_rows, x_tail_rows;     // tokens of those boxes
  bool out_is_aligned, x_is_aligned;
  bool copies_out;  // by the copy engine: aligned bf16. Else by the warps
};

// ---- Epilogue ---------------------------------------------------------------------------------
//
// Accumulators lie as those of mma.m16n8k16: of 16 tokens and 16 weight rows lane 4 * g + c holds
// tokens g and g + 8, and of each strip rows 2c, 2c + 1 (values 0..1, 2..3) and 8 + 2c, 9 + 2c
// (values 4..5, 6..7).

// Word i of lane c goes to lane i as word c, in every four lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int c) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (c & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? w[i] : w[i + bit], bit);
      (upper ? w[i] : w[i + bit]) = got;
    }
  }
}

// 16 columns of out from `column` on, of tokens `token` and `token` + 8, as 16 bytes of each lane:
// lane c of a quad has columns 8 * (c % 2) .. + 7 of token + 8 * (c / 2). transpose_quad makes of
// them, and back: word 2 * i + j of lane c is columns 8j + 2c, 8j + 2c + 1 of token + 8i.
__device__ __forceinline__ void load_columns(uint32_t (&words)[4], const KernelParams& p, int token,
                                             int column, int c) {
  const GemmParams& m = p.gemm;
  const auto* out = static_cast<const __nv_bfloat16*>(m.out);
  const int row = token + 8 * (c / 2), first = column + 8 * (c % 2);
  const __nv_bfloat16* from = out + row * m.out_stride + first;
  if (p.out_is_aligned && column + 16 <= m.n) {
    uint4 v = {0, 0, 0, 0};
    if (row < m.t) v = *reinterpret_cast<const uint4*>(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool low = row < m.t && first + 2 * i < m.n, high = low && first + 2 * i + 1 < m.n;
      words[i] = (low ? __bfloat16_as_ushort(from[2 * i]) : 0) |
                 (high ? __bfloat16_as_ushort(from[2 * i + 1]) << 16 : 0);
    }
  }
}

// Stores what transpose_quad made of such words.
__device__ __forceinline__ void store_columns(const uint32_t (&words)[4], const KernelParams& p,
                                              int token, int column, int c) {
  const GemmParams& m = p.gemm;
  auto* out = static_cast<__nv_bfloat16*>(m.out);
  const int row = token + 8 * (c / 2), first = column + 8 * (c % 2);
  if (row >= m.t) return;
  __nv_bfloat16* to = out + row * m.out_stride + first;
  if (p.out_is_aligned && column + 16 <= m.n) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i >= m.n) break;
      to[i] = __ushort_as_bfloat16(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16)));
    }
  }
}

// The sums of a strip, as they lie in a lane: two lanes exchange halves, so that each stores 16
// bytes of token and token + 8.
__device__ __forceinline__ void store_floats(const float* sums, const KernelParams& p, int token,
                                             int column, int c) {
  const GemmParams& m = p.gemm;
  const bool odd = c % 2 != 0;
  const int first = column + (odd ? 8 + 2 * (c - 1) : 2 * c);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float got[2], v[4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      got[e] = __shfl_xor_sync(0xffffffff, odd ? sums[2 * i + e] : sums[4 + 2 * i + e], 1);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      v[e] = odd ? got[e] : sums[2 * i + e];
      v[2 + e] = odd ? sums[4 + 2 * i + e] : got[e];
    }
    const int row = token + 8 * i;
    if (row >= m.t) continue;
    float* to = static_cast<float*>(m.out) + row * m.out_stride + first;
    if (p.out_is_aligned && column + kStripRows <= m.n) {
      *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first + e < m.n) to[e] = v[e];
      }
    }
  }
}

__device__ __forceinline__ float silu(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;"
      : "=f"(inverse)
      : "f"(1.0f + exp2_approx(x * -1.4426950408889634f)));
  return x * inverse;
}

// What kAdd adds to, for two neighbouring strips: loaded before the sums are there, and before any
// store to out, which would hold up the loads that follow it.
using Residual = uint32_t[2][4];

__device__ __forceinline__ void load_residual(Residual& residual, const KernelParams& p, int token,
                                              int strip, int c) {
  const bool adds = p.gemm.epilogue == GemmEpilogue::kAdd;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    // Set in any case: else their registers are taken from the start of the kernel on.
    residual[s][0] = residual[s][1] = residual[s][2] = residual[s][3] = 0;
    if (adds) load_columns(residual[s], p, token, (strip + s) * kStripRows, c);
  }
}

// Adds to the sums of two neighbouring strips.
__device__ __forceinline__ void add_bias(float* v, const KernelParams& p, int strip, int c) {
  const GemmParams& m = p.gemm;
  const bool is_gate = m.epilogue == GemmEpilogue::kGate;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int s = i / 8, j = i / 4 % 2, e = i % 2;
    const int column =
        is_gate ? (strip + s) * 8 + 2 * c + e : (strip + s) * kStripRows + 8 * j + 2 * c + e;
    if (column < m.n) v[i] += __bfloat162float(m.bias[is_gate && j == 1 ? m.n + column : column]);
  }
}

// Finishes the sums of tokens `token` and `token` + 8 and of pairs of neighbouring strips: the
// first one even, the pairs `apart` from each other. All words are made before any is stored, so
// that a warp, often alone on its scheduler, has independent work.
template <int kPairs>
__device__ __forceinline__ void finish(float* v, Residual* residual, const KernelParams& p,
                                       int token, int strip, int apart, int c) {
  const GemmParams& m = p.gemm;
  if (m.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) add_bias(&v[16 * i], p, strip + i * apart, c);
  }
  if (m.epilogue == GemmEpilogue::kGate) {
    uint32_t words[kPairs][4];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // token, token + 8
          const float* sums = &v[16 * i + 8 * s + 2 * half];
          words[i][2 * half + s] = pack_bf16(silu(sums[0]) * sums[4], silu(sums[1]) * sums[5]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) transpose_quad(words[i], c);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      store_columns(words[i], p, token, (strip + i * apart) * 8, c);
    }
    return;
  }
  if (m.out_is_float) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      store_floats(&v[8 * i], p, token, (strip + i / 2 * apart + i % 2) * kStripRows, c);
    }
    return;
  }
  const auto words_of = [&](int i) -> uint32_t (&)[4] { return residual[i / 2][i % 2]; };
  if (m.epilogue == GemmEpilogue::kAdd) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      transpose_quad(words_of(i), c);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        float* sums = &v[8 * i + 4 * (word % 2) + 2 * (word / 2)];
        sums[0] += __uint_as_float(words_of(i)[word] << 16);
        sums[1] += __uint_as_float(words_of(i)[word] & 0xffff0000);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float* sums = &v[8 * i + 4 * (word % 2) + 2 * (word / 2)];
      words_of(i)[word] = pack_bf16(sums[0], sums[1]);
    }
    transpose_quad(words_of(i), c);
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    store_columns(words_of(i), p, token, (strip + i / 2 * apart + i % 2) * kStripRows, c);
  }
}

// The steps of K of a group.
__device__ __forceinline__ int first_step(const KernelParams& p, int group) {
  return static_cast<int>(static_cast<int64_t>(group) * p.steps / p.groups);
}

// Which tile is the i-th: bands of token tiles, so that tiles made at the same time share weight
// rows as well as tokens.
struct TilePlace {
  int token_tile, row_tile;
};

__device__ __forceinline__ TilePlace tile_place(int i, const KernelParams& p) {
  const int band = i / (p.band * p.row_tiles), in_band = i - band * p.band * p.row_tiles;
  const int width = min(p.band, p.token_tiles - band * p.band);
  return {band * p.band + in_band % width, in_band / width};
}

// ---- sm_90: tensor copies and wgmma -----------------------------------------------------------

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TINYVLLM_WGMMA 1
#else
#define TINYVLLM_WGMMA 0
#endif

// Threads of a block. For few tokens the compiler is told more than there are, so that all tiles of
// up to 128 tokens begin with the same number of registers.
constexpr int max_threads(int tokens) { return 128 * (std::max(tokens, 128) / 64 + 1); }

constexpr int kBoxBytes = 64 * 128;  // of out: 64 tokens x 64 columns

template <int kTokens_, int kRows_, Mode kMode_, int kGroups_>
struct Tile {
  static constexpr int kTokens = kTokens_, kRows = kRows_, kGroups = kGroups_;
  static constexpr Mode kMode = kMode_;
  static constexpr int kCluster = kMode == Mode::kAlone ? 1 : 2;
  static constexpr int kConsumers = kTokens / 64;  // warpgroups
  static constexpr int kXBytes = kTokens * kStepK * 2;
  static constexpr int kWBytes = kRows * kStepK * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Sums of the ranges of K before, beside those of this one: so many of a thread are in shared
  // memory, where there are no registers for them.
  static constexpr bool kHasTotals = kMode != Mode::kPair && kGroups == 2;
  static constexpr int kSharedTotals = kHasTotals && kRows == 256 ? 80 : 0;
  // Beside the ring: for kPair the sums that come from the other block, half a tile; else of each
  // warpgroup those totals, and then what is copied out, kStaged columns at a time.
  static constexpr int kStaged = kHasTotals ? kRows : kRows / 2;
  static constexpr int kStagedBytes = std::max(kStaged / 64 * kBoxBytes, kSharedTotals * 128 * 4);
  static constexpr int kSumBytes =
      kMode == Mode::kPair ? kTokens * kRows * 4 / 2 : kConsumers * kStagedBytes;
  static constexpr int kStages = std::min(200 * 1024, 227 * 1024 - 256 - kSumBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kSumBytes + 16 * kStages + 8;
  static_assert(kSharedBytes <= 227 * 1024);
};

#if TINYVLLM_WGMMA
// What the kernel alone needs to know of its tile.
template <int kTokens, int kRows, Mode kMode, int kGroups>
struct KernelTile : Tile<kTokens, kRows, kMode, kGroups> {
  static constexpr bool kShares = kMode == Mode::kShareWeight || kMode == Mode::kShareTokens;
  // Of the registers that a thread has at the start (max_threads), producers give to consumers.
  static constexpr int kProducerRegisters = kTokens <= 128 ? 24 : 32;
  static constexpr int kConsumerRegisters = kTokens <= 128 ? 240 : 160;
};

// What kAdd adds to, in boxes of 64 columns for each warpgroup: some of them in each of the slots
// of the ring that they pass through.
template <typename T>
struct AddedBoxes {
  static constexpr int kAll = T::kRows / 64;
  static constexpr int kInSlot = T::kStageBytes / (T::kConsumers * kBoxBytes);
  static constexpr int kSlots = (kAll + kInSlot - 1) / kInSlot;
};

// A matrix in shared memory for wgmma: rows of 64 or 128 swizzled bytes (layout 2 or 1), of which
// eight take group_bytes. The low word counts 16 bytes, so 16 inputs further is 2 more.
__device__ __forceinline__ uint32_t matrix_at(uint32_t address) { return address / 16 | 1u << 16; }

__device__ __forceinline__ uint64_t describe(uint32_t low, uint32_t group_bytes, uint32_t layout) {
  return uint64_t{group_bytes / 16 | layout << 30} << 32 | low;
}

#define TINYVLLM_R8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TINYVLLM_R32(i) TINYVLLM_R8(i), TINYVLLM_R8(i + 8), TINYVLLM_R8(i + 16), TINYVLLM_R8(i + 24)

// d [64 tokens, rows] = (keep ? d : 0) + x [64 tokens, 16] * w [rows, 16], begun, to be waited for.
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t x, uint64_t w, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0; }"
      : TINYVLLM_R32(0)
      : "l"(x), "l"(w), "r"(keep));
}

__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t x, uint64_t w, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0; }"
      : TINYVLLM_R32(0), TINYVLLM_R32(32)
      : "l"(x), "l"(w), "r"(keep));
}

__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t x, uint64_t w, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
      "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
      "%126, %127"
      "}, %128, %129, p, 1, 1, 0, 0; }"
      : TINYVLLM_R32(0), TINYVLLM_R32(32), TINYVLLM_R32(64), TINYVLLM_R32(96)
      : "l"(x), "l"(w), "r"(keep));
}
#undef TINYVLLM_R32
#undef TINYVLLM_R8

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending groups of products are on their way; the accumulators may be read after 0.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The first copy of a kernel would wait for its map.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_x(uint32_t to, const CUtensorMap* map, int k, int token,
                                       uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(k), "r"(token), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_w(uint32_t to, const CUtensorMap* map, int strip, int tile,
                                       uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(0), "r"(strip), "r"(tile), "r"(barrier)
      : "memory");
}

// The same copies, to the same place in both blocks of the cluster, each counted in on its own
// barrier.
__device__ __forceinline__ void copy_x_to_both(uint32_t to, const CUtensorMap* map, int k,
                                               int token, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(k), "r"(token), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ void copy_w_to_both(uint32_t to, const CUtensorMap* map, int strip,
                                               int tile, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(strip), "r"(tile), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// A box of out.
__device__ __forceinline__ void copy_out(const CUtensorMap* map, int column, int token,
                                         uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(token), "r"(from)
      : "memory");
}

__device__ __forceinline__ void commit_copies_out() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until what this thread copied out has been read.
__device__ __forceinline__ void wait_copies_out_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until what this thread copied out has been written.
__device__ __forceinline__ void wait_copies_out() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What this thread wrote in shared memory is seen by the copy engine after the next barrier.
__device__ __forceinline__ void fence_copies_out() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

// Four 8x8 matrices, as load_matrices.
__device__ __forceinline__ void store_matrices(uint32_t row_address, const uint32_t (&w)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
      : "memory");
}

// For barriers of either block, at addresses of in_block: says that products have been made, and
// publishes nothing.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The first step of cluster_wait's barrier, after fence_barrier_init: publishes nothing else.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void store_floats_shared(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ float4 load_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Adds four floats of shared memory.
__device__ __forceinline__ void add_floats(float* v, uint32_t address) {
  asm volatile(
      "{ .reg .f32 a, b, c, d;\n"
      "ld.shared.v4.f32 {a, b, c, d}, [%4];\n"
      "add.f32 %0, %0, a; add.f32 %1, %1, b; add.f32 %2, %2, c; add.f32 %3, %3, d; }"
      : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
      : "r"(address)
      : "memory");
}

// A position in the ring and the parity of its barriers' phase.
template <int kSize>
struct Slot {
  int at = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++at == kSize) {
      at = 0;
      parity ^= 1;
    }
  }
};

template <typename T>
__device__ __forceinline__ int first_token(const TilePlace& tile, int rank) {
  const bool neighbours = T::kMode == Mode::kShareWeight;
  return (neighbours ? 2 * tile.token_tile + rank : tile.token_tile) * T::kTokens;
}

template <typename T>
__device__ __forceinline__ int first_strip(const TilePlace& tile, int rank) {
  const bool neighbours = T::kMode == Mode::kShareTokens;
  return (neighbours ? 2 * tile.row_tile + rank : tile.row_tile) * (T::kRows / kStripRows);
}

// The two threads that fill the ring, one with the weight and one with x: asking takes time, so
// what does not change from step to step stays out of the loops.
template <typename T, bool kIsX>
__device__ __forceinline__ void produce(const KernelParams& p, uint32_t ring, uint32_t full,
                                        uint32_t empty, int rank, int work, int works,
                                        int work_stride) {
  const int begin = T::kMode == Mode::kPair ? first_step(p, rank) : 0;
  const int end = T::kMode == Mode::kPair ? first_step(p, rank + 1) : p.steps;
  const bool adds = p.copies_out && p.gemm.epilogue == GemmEpilogue::kAdd;
  Slot<T::kStages> slot;
  int until_next_kernel = T::kStages;
  const auto fill = [&](const auto& ask) {  // a slot, once it is free
    barrier_wait(empty + 8 * slot.at, slot.parity ^ 1);
    ask(ring + slot.at * T::kStageBytes, full + 8 * slot.at);
    slot.next();
    if (!kIsX && --until_next_kernel == 0) let_next_kernel_start();  // the ring is full
  };
  if (kIsX) wait_for_previous_kernels();
  for (; work < works; work += work_stride) {
    const TilePlace tile = tile_place(work, p);
    const int token = first_token<T>(tile, rank), strip = first_strip<T>(tile, rank);
    const bool is_tail = token + T::kTokens > p.gemm.t;
    const bool is_empty = T::kMode == Mode::kShareWeight && token >= p.gemm.t;
    if constexpr (kIsX) {
      const auto fill_steps = [&](const CUtensorMap* map, int first) {
        for (int step = begin; step < end; ++step) {
          fill([&](uint32_t to, uint32_t barrier) {
            if constexpr (T::kMode == Mode::kShareTokens) {
              copy_x_to_both(to + first * 128, map, step * kStepK, token + first, barrier);
            } else if (!is_empty) {
              copy_x(to, map, step * kStepK, token, barrier);
            }
          });
        }
      };
      if (is_tail) {
        fill_steps(&p.x_tail_map, rank * p.x_tail_rows);
      } else {
        fill_steps(&p.x_map, rank * p.x_rows);
      }
    } else {
      const int boxes = is_empty ? 0 : T::kMode == Mode::kShareTokens ? 2 : 1;
      const int x_bytes = boxes * (is_tail ? p.x_tail_rows : p.x_rows) * 128;
      for (int step = begin; step < end; ++step) {
        fill([&](uint32_t to, uint32_t barrier) {
          barrier_expect(barrier, x_bytes + T::kWBytes);  // x too, which may come first
          const uint32_t w = to + T::kXBytes;
          if constexpr (T::kMode == Mode::kShareWeight) {  // one of the step's two tiles
            copy_w_to_both(w + rank * (T::kWBytes / 2), &p.w_map, strip, step * kStepTiles + rank,
                           barrier);
          } else {
            copy_w(w, &p.w_map, strip, step * kStepTiles, barrier);
          }
        });
      }
    }
    if constexpr (T::kMode != Mode::kPair) {
      using Boxes = AddedBoxes<T>;
      for (int first = 0; adds && first < Boxes::kAll; first += Boxes::kInSlot) {
        const int last = min(first + Boxes::kInSlot, Boxes::kAll);
        fill([&](uint32_t to, uint32_t barrier) {
          if (!kIsX) barrier_expect(barrier, (last - first) * T::kConsumers * kBoxBytes);
          for (int i = first; kIsX && i < last; ++i) {
            for (int wg = 0; wg < T::kConsumers; ++wg, to += kBoxBytes) {
              copy_x(to, &p.out_map, strip * kStripRows + 64 * i, token + 64 * wg, barrier);
            }
          }
        });
      }
    }
  }
  if (!kIsX && until_next_kernel > 0) let_next_kernel_start();
}

// Finishes the sums of a tile of a warpgroup, 64 tokens, and has them copied out, box by box.
template <typename T, typename Release>
__device__ __forceinline__ void copy_tile_out(float (&v)[T::kRows / 2], const KernelParams& p,
                                              uint32_t staged, uint32_t ring, uint32_t full,
                                              Slot<T::kStages>& slot, const Release& release,
                                              int warpgroup, int warp_token, int strip) {
  const GemmParams& m = p.gemm;
  int lane;  // read here, not kept
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int c = lane % 4, row = lane % 8, warp = threadIdx.x / 32 % 4;
  const bool is_first = threadIdx.x % 128 == 0;
  // in_box: where 8 columns of a token lie, of the i-th 16 columns. A lane says it of one token and
  // one of two such octets, as load_matrices takes it.
  const uint32_t place = (warp * 16 + lane / 8 % 2 * 8 + row) * 128;
  const uint32_t octet = (lane / 16 ^ row) * 16;
  const auto in_box = [&](int i) { return i / 4 * kBoxBytes + place + (octet ^ i % 4 * 32); };
  const int first_token = warp_token - warp * 16;
  if (m.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < T::kRows / 32; ++i) add_bias(&v[16 * i], p, strip + 2 * i, c);
  }
  const auto may_stage = [&] {
    if (is_first) wait_copies_out_read();
    warpgroup_barrier(warpgroup);
  };
  const auto store = [&](int first_column, int columns) {
    fence_copies_out();
    warpgroup_barrier(warpgroup);
    if (is_first) {
#pragma unroll
      for (int i = 0; i < columns / 64; ++i) {
        copy_out(&p.out_map, first_column + 64 * i, first_token, staged + i * kBoxBytes);
      }
      commit_copies_out();
    }
  };
  may_stage();
  if (m.epilogue == GemmEpilogue::kGate) {
#pragma unroll
    for (int i = 0; i < T::kRows / 32; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // strip, then token and token + 8
        const float* sums = &v[16 * i + 8 * (j / 2) + 2 * (j % 2)];
        words[j] = pack_bf16(silu(sums[0]) * sums[4], silu(sums[1]) * sums[5]);
      }
      store_matrices(staged + in_box(i), words);
    }
    store(strip * 8, T::kRows / 2);
    return;
  }
  using Boxes = AddedBoxes<T>;
  const bool adds = m.epilogue == GemmEpilogue::kAdd;
  if (adds) {
#pragma unroll
    for (int i = 0; i < Boxes::kAll; ++i) {
      if (i % Boxes::kInSlot == 0) {
        if (i > 0) slot.next();
        barrier_wait(full + 8 * slot.at, slot.parity);
      }
      const uint32_t box = ring + slot.at * T::kStageBytes +
                           (i % Boxes::kInSlot * T::kConsumers + warpgroup) * kBoxBytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Fragment4 words;
        load_matrices(words, box + in_box(j));
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float* sums = &v[32 * i + 8 * j + 2 * word];
          sums[0] += __uint_as_float(words[word] << 16);
          sums[1] += __uint_as_float(words[word] & 0xffff0000);
        }
      }
    }
    slot.next();
  }
#pragma unroll
  for (int pass = 0; pass < T::kRows / T::kStaged; ++pass) {
    if (pass > 0) may_stage();
#pragma unroll
    for (int i = 0; i < T::kStaged / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float* sums = &v[pass * (T::kStaged / 2) + 8 * i + 2 * word];
        words[word] = pack_bf16(sums[0], sums[1]);
      }
      store_matrices(staged + in_box(i), words);
    }
    store(strip * kStripRows + pass * T::kStaged, T::kStaged);
  }
  // After a barrier, so that all lanes have read their part.
  for (int i = 0; adds && i < Boxes::kSlots; ++i) release();
}
#endif  // TINYVLLM_WGMMA

// Dynamic shared memory: ring [x | weight], kSumBytes, barriers.
template <int kTokens, int kRows, Mode kMode, int kGroups>
__global__ void __launch_bounds__(max_threads(kTokens), 1)
    gemm_kernel(const __grid_constant__ KernelParams p) {
#if TINYVLLM_WGMMA
  using T = KernelTile<kTokens, kRows, kMode, kGroups>;
  extern __shared__ __align__(1024) char shared[];
  uint32_t ring = shared_address(shared);
  asm volatile("" : "+r"(ring));  // kept, not made again in every step
  const uint32_t other_sums = ring + T::kStages * T::kStageBytes;
  const uint32_t full = other_sums + T::kSumBytes;
  const uint32_t empty = full + 8 * T::kStages, sums_full = empty + 8 * T::kStages;
  // From one lane: the compiler then knows that a warp takes one branch, and computes where wgmma
  // reads (uniform registers) instead of moving it there in every step.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int rank = kMode == Mode::kAlone ? 0 : cluster_rank();
  constexpr int cluster = T::kCluster;
  const int first_work = blockIdx.x / cluster, work_stride = gridDim.x / cluster;
  const int works = p.token_tiles * p.row_tiles;

  if (threadIdx.x == T::kConsumers * 128) {
    prefetch_map(&p.w_map);
    prefetch_map(p.gemm.t < kTokens ? &p.x_tail_map : &p.x_map);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, T::kConsumers * 4 * (T::kShares ? 2 : 1));
    }
    if constexpr (kMode == Mode::kPair) barrier_init(sums_full, 1);
    fence_barrier_init();
    if constexpr (kMode == Mode::kPair) barrier_expect(sums_full, T::kSumBytes);
  }
  __syncthreads();
  if constexpr (kMode != Mode::kAlone) cluster_arrive_relaxed();

  if (warpgroup == T::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kProducerRegisters));
    if constexpr (T::kShares) cluster_wait();
    if (lane == 0 && warp == 0) {
      produce<T, false>(p, ring, full, empty, rank, first_work, works, work_stride);
    } else if (lane == 0 && warp == 1) {
      produce<T, true>(p, ring, full, empty, rank, first_work, works, work_stride);
    }
    if constexpr (kMode == Mode::kPair) {
      __syncwarp();
      cluster_wait();
    } else if constexpr (T::kShares) {
      __syncwarp();
      cluster_sync();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kConsumerRegisters));
    if constexpr (T::kShares) cluster_wait();
    wait_for_previous_kernels();
    constexpr bool kLoadsEarly = kMode == Mode::kPair;
    Slot<T::kStages> slot, used;
    const uint32_t x_matrix = matrix_at(ring + warpgroup * 64 * 128);
    const uint32_t w_matrix = matrix_at(ring + T::kXBytes);
    const int g = lane / 4, c = lane % 4;
    const uint32_t release_at = T::kShares ? in_block(empty, lane == 0 ? rank : rank ^ 1) : empty;
    const auto release = [&] {
      if constexpr (T::kShares) {
        if (lane < 2) barrier_arrive_in_cluster(release_at + 8 * used.at);
      } else {
        if (lane == 0) barrier_arrive(release_at + 8 * used.at);
      }
      used.next();
    };
    // acc = the sum of a range of steps. The tensor cores have the next step before they are done
    // with this one, and more where the ring is long enough.
    constexpr int kBehind = T::kStages < 8 ? 1 : 2;
    const auto multiply = [&](float (&acc)[kRows / 2], int begin, int end) {
    // Else the registers of acc are taken from the end of one tile to the start of the next.
#pragma unroll
      for (float& v : acc) v = 0.0f;
      for (int step = begin; step < end; ++step) {
        barrier_wait(full + 8 * slot.at, slot.parity);
        const uint32_t stage = slot.at * (T::kStageBytes / 16);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kStepK / 16; ++i) {
          wgmma(acc, describe(x_matrix + stage + i * 2, 1024, 1),
                describe(w_matrix + stage + i / 2 * (T::kWBytes / 2 / 16) + i % 2 * 2, 512, 2),
                step > begin || i > 0);
        }
        wgmma_commit();
        slot.next();
        if (step >= begin + kBehind) {
          wgmma_wait<kBehind>();
          release();
        }
      }
      wgmma_wait<0>();
#pragma unroll 1
      for (int step = max(begin, end - kBehind); step < end; ++step) release();
    };
    for (int work = first_work; work < works; work += work_stride) {
      const TilePlace tile = tile_place(work, p);
      const int warp_token = first_token<T>(tile, rank) + warpgroup * 64 + warp * 16;
      int token = warp_token + g;
      float acc[kRows / 2];
      // Of a shared tile's pairs of strips, each block finishes every second.
      constexpr int kApart = kMode == Mode::kPair ? 2 : 1;
      int strip = first_strip<T>(tile, rank) + (kMode == Mode::kPair ? 2 * rank : 0);
      constexpr int kPairs = kRows / 32 / kApart;
      Residual residual[kPairs];
      constexpr int kAtOnce = kMode == Mode::kPair ? kPairs : 1;
      const auto load_residuals = [&](int first) {
#pragma unroll
        for (int i = first; i < first + kAtOnce; ++i) {
          load_residual(residual[i], p, token, strip + 2 * i * kApart, c);
        }
      };
      if constexpr (kLoadsEarly) load_residuals(0);
      constexpr int kKept = T::kHasTotals ? kRows / 2 - T::kSharedTotals : 0;  // in `total`
      constexpr int kTotalPlane = 128 * 16;  // bytes of one float4 of every thread
      const uint32_t staged = other_sums + warpgroup * T::kStagedBytes;
      const uint32_t mine = staged + threadIdx.x % 128 * 16;
      float total[kKept > 0 ? kKept : 1];
      if constexpr (kMode == Mode::kPair) {
        multiply(acc, first_step(p, rank), first_step(p, rank + 1));
      } else if constexpr (T::kHasTotals) {
#pragma unroll
        for (float& v : total) v = 0.0f;
#pragma unroll 1
        for (int group = 0; group < p.groups; ++group) {
          multiply(acc, first_step(p, group), first_step(p, group + 1));
#pragma unroll
          for (int i = 0; i < kKept; ++i) total[i] += acc[i];
          if (T::kSharedTotals > 0 && group == 0) {  // of two
            if (threadIdx.x % 128 == 0) wait_copies_out_read();
            warpgroup_barrier(warpgroup);
#pragma unroll
            for (int i = 0; i < T::kSharedTotals / 4; ++i) {
              const float* v = &acc[kKept + 4 * i];
              store_floats_shared(mine + i * kTotalPlane, {v[0], v[1], v[2], v[3]});
            }
          }
        }
      } else {
        multiply(acc, 0, p.steps);
      }
      // What follows from these is computed now, not kept while products are made.
      asm volatile("" : "+r"(token), "+r"(strip));
      float sums[16 * kPairs];
      if constexpr (kMode == Mode::kPair) {
        // The same thread of the other block finishes the rest, and sends what this one lacks.
        const int other = rank ^ 1;
        const uint32_t from = other_sums + threadIdx.x * 16, to = in_block(from, other);
        const uint32_t to_full = in_block(sums_full, other);
        constexpr int kPlane = T::kConsumers * 128 * 16;  // bytes of one float4 of every consumer
        cluster_wait();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          float sent[16];
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            const float even = acc[32 * i + j], odd = acc[32 * i + 16 + j];
            sent[j] = rank == 0 ? odd : even;
            sums[16 * i + j] = rank == 0 ? even : odd;
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            store_remote(to + (4 * i + j) * kPlane,
                         {sent[4 * j], sent[4 * j + 1], sent[4 * j + 2], sent[4 * j + 3]}, to_full);
          }
        }
        barrier_wait_cluster(sums_full, 0);
#pragma unroll
        for (int i = 0; i < 4 * kPairs; ++i) {
          const float4 v = load_floats(from + i * kPlane);
          sums[4 * i] += v.x;
          sums[4 * i + 1] += v.y;
          sums[4 * i + 2] += v.z;
          sums[4 * i + 3] += v.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 16 * kPairs; i += 4) {
#pragma unroll
          for (int e = i; e < i + 4; ++e) sums[e] = i < kKept ? total[e < kKept ? e : 0] : acc[e];
          if (T::kSharedTotals > 0 && i >= kKept) {
            add_floats(&sums[i], mine + (i - kKept) / 4 * kTotalPlane);
          }
        }
        if (T::kSharedTotals > 0 || p.copies_out) {
          copy_tile_out<T>(sums, p, staged, ring, full, slot, release, warpgroup, warp_token,
                           strip);
          continue;
        }
        if constexpr (T::kSharedTotals == 0) load_residuals(0);
      }
      if constexpr (T::kSharedTotals == 0) {
#pragma unroll
        for (int i = 0; i < kPairs; i += kAtOnce) {
          if (i + kAtOnce < kPairs) load_residuals(i + kAtOnce);
          finish<kAtOnce>(&sums[16 * i], &residual[i], p, token, strip + 2 * i * kApart, 2 * kApart,
                          c);
        }
      }
    }
    if constexpr (kMode != Mode::kPair) {
      if (threadIdx.x % 128 == 0) wait_copies_out();
    }
    if constexpr (T::kShares) cluster_sync();
  }
#else
  __trap();  // launched on sm_90 alone, which must be compiled as 90a
#endif
}

// ---- Everywhere: cp.async and mma.sync ----------------------------------------------------------

constexpr int kPortableTokens = 128, kPortableRows = 64, kPortableStages = 3;
constexpr int kPortableWarps = kPortableTokens / 16;  // 16 tokens each
constexpr int kPortableXBytes = kPortableTokens * kStepK * 2;
constexpr int kPortableWBytes = kPortableRows * kStepK * 2;
constexpr int kPortableStageBytes = kPortableXBytes + kPortableWBytes;

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Eight inputs of a token from k on, zeros from m.k on.
__device__ __noinline__ uint4 load_odd_octet(const GemmParams& m, int token, int k) {
  uint32_t words[4] = {0, 0, 0, 0};
  for (int i = 0; i < 8 && token < m.t && k + i < m.k; ++i) {
    const uint32_t value = __bfloat16_as_ushort(m.x[token * m.x_stride + k + i]);
    words[i / 2] |= value << (i % 2 * 16);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A block makes one tile of 128 tokens x 64 weight rows. Shared memory: 3 stages of 24 KiB, what
// every GPU has room for, [x: tensor_cores.cuh's rows of 8 chunks | weight: strip, tile].
__global__ void __launch_bounds__(kPortableWarps * 32, 1)
    gemm_portable_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared[];
  const GemmParams& m = p.gemm;
  const uint32_t base = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const TilePlace tile = tile_place(blockIdx.x, p);
  const int first_token = tile.token_tile * kPortableTokens;
  const int first_strip = tile.row_tile * (kPortableRows / kStripRows);
  wait_for_previous_kernels();

  const auto load = [&](int step) {
    if (step < p.steps) {
      const uint32_t x = base + step % kPortableStages * kPortableStageBytes;
      const uint32_t w = x + kPortableXBytes;
#pragma unroll
      for (int i = 0; i < kPortableXBytes / 16 / (kPortableWarps * 32); ++i) {
        const int at = threadIdx.x + i * kPortableWarps * 32, row = at / 8, chunk = at % 8;
        const uint32_t to = x + row * 128 + ((chunk ^ row % 8) * 16);
        const int token = first_token + row, k = step * kStepK + chunk * 8;
        if (p.x_is_aligned) {
          const bool valid = token < m.t && k < m.k;
          copy_16_async(to, valid ? m.x + token * m.x_stride + k : m.x, valid);
        } else {
          store_shared(to, load_odd_octet(m, token, k));
        }
      }
#pragma unroll
      for (int i = 0; i < kPortableWBytes / 16 / (kPortableWarps * 32); ++i) {
        const int at = threadIdx.x + i * kPortableWarps * 32;  // strip, tile, octet
        const int strip = first_strip + at / 128, k_tile = step * kStepTiles + at / 64 % 2;
        const bool valid = strip < p.strips && k_tile < p.tiles;
        const char* from = static_cast<const char*>(m.packed);
        if (valid) {
          from += (static_cast<int64_t>(strip) * p.tiles + k_tile) * kTileBytes + at % 64 * 16;
        }
        copy_16_async(w + at * 16, from, valid);
      }
    }
    commit_copies();
  };

  float acc[kPortableRows / 8][4], total[kPortableRows / 8][4] = {};
  for (int i = 0; i < kPortableStages - 1; ++i) load(i);
  int step = 0;
  for (int group = 0; group < p.groups; ++group) {
#pragma unroll
    for (auto& block : acc) block[0] = block[1] = block[2] = block[3] = 0.0f;
    for (const int end = first_step(p, group + 1); step < end; ++step) {
      wait_copies<kPortableStages - 2>();
      __syncthreads();
      load(step + kPortableStages - 1);
      const uint32_t x = base + step % kPortableStages * kPortableStageBytes;
      const uint32_t w = x + kPortableXBytes;
      const int matrix = lane / 8, row = lane % 8;
#pragma unroll
      for (int i = 0; i < kStepK / 16; ++i) {
        Fragment4 a, b;
        const int token = warp * 16 + matrix % 2 * 8 + row;
        load_matrices(a, x + token * 128 + (((2 * i + matrix / 2) ^ row) * 16));
#pragma unroll
        for (int strip = 0; strip < kPortableRows / kStripRows; ++strip) {
          const int in_tile =
              (matrix / 2 * 8 + row) * 64 + ((i % 2 * 2 + matrix % 2) ^ (row / 2)) * 16;
          load_matrices(b, w + (strip * kStepTiles + i / 2) * kTileBytes + in_tile);
          multiply_add(acc[2 * strip], a, b[0], b[1]);
          multiply_add(acc[2 * strip + 1], a, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPortableRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] += acc[i][j];
    }
  }
  let_next_kernel_start();
  constexpr int kPairs = kPortableRows / 32;
  float sums[16 * kPairs];
#pragma unroll
  for (int i = 0; i < 16 * kPairs; ++i) sums[i] = total[i / 4][i % 4];
  const int token = first_token + warp * 16 + g;
  Residual residual[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) load_residual(residual[i], p, token, first_strip + 2 * i, c);
  finish<kPairs>(sums, residual, p, token, first_strip, 2, c);
}

// ---- Launching --------------------------------------------------------------------------------

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("gemm: ") + what + ": " + cudaGetErrorString(error));
}

int divide_up(int64_t n, int by) { return static_cast<int>((n + by - 1) / by); }

bool is_multiple(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Ranges of K: two where the multiprocessors of a large GPU outnumber its tiles of 64 weight rows
// so far, of at least 512 inputs. A constant, not the GPU's own number: bits should not depend on
// that.
int num_groups(int strips, int steps) {
  constexpr int kBlocks = 132, kMinSteps = 8;
  const int blocks = kBlocks / divide_up(strips, 4);
  return std::clamp(std::min(blocks, steps / kMinSteps), 1, kMaxGroups);
}

template <typename Kernel>
void launch(Kernel kernel, const KernelParams& p, int blocks, int threads, int cluster,
            int shared_bytes, Stream stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "shared memory");
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (can_launch_early()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, p), "launch");
  check_launch("gemm");
}

template <int kTokens, int kRows, Mode kMode, int kGroups>
void launch_tiles(KernelParams p, Stream stream) {
  using T = Tile<kTokens, kRows, kMode, kGroups>;
  const GemmParams& m = p.gemm;
  constexpr bool kShareWeight = kMode == Mode::kShareWeight;
  constexpr bool kShareTokens = kMode == Mode::kShareTokens;
  constexpr int kStrips = kRows / kStripRows;
  p.token_tiles = divide_up(m.t, kTokens * (kShareWeight ? 2 : 1));
  p.row_tiles = divide_up(p.strips, kStrips * (kShareTokens ? 2 : 1));
  p.band = kShareWeight ? 8 : 16;
  const auto encode_x = [&](CUtensorMap& map, int rows) {
    encode_tensor_map<2>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, m.x,
                         {static_cast<cuuint64_t>(m.k), static_cast<cuuint64_t>(m.t)},
                         {static_cast<cuuint64_t>(m.x_stride) * 2},
                         {kStepK, static_cast<cuuint32_t>(rows)}, CU_TENSOR_MAP_SWIZZLE_128B);
  };
  const int tail = m.t % kTokens;
  p.x_rows = kShareTokens ? kTokens / 2 : kTokens;
  p.x_tail_rows = kShareTokens ? divide_up(tail, 16) * 8 : tail;  // whole rows of the swizzle
  if (m.t >= kTokens) encode_x(p.x_map, p.x_rows);
  if (tail > 0) encode_x(p.x_tail_map, p.x_tail_rows);
  const cuuint64_t tiles = static_cast<cuuint64_t>(p.tiles);
  encode_tensor_map<3>(
      p.w_map, CU_TENSOR_MAP_DATA_TYPE_UINT32, m.packed,
      {kTileBytes / 4, static_cast<cuuint64_t>(p.strips), tiles}, {tiles * kTileBytes, kTileBytes},
      {kTileBytes / 4, kStrips, kShareWeight ? 1 : kStepTiles}, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.copies_out &= kMode != Mode::kPair;
  if (p.copies_out) {
    encode_tensor_map<2>(p.out_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, m.out,
                         {static_cast<cuuint64_t>(m.n), static_cast<cuuint64_t>(m.t)},
                         {static_cast<cuuint64_t>(m.out_stride) * 2}, {64, 64},
                         CU_TENSOR_MAP_SWIZZLE_128B);
  }
  const int works = p.token_tiles * p.row_tiles;
  const int blocks = kMode == Mode::kPair
                         ? 2 * works
                         : T::kCluster * std::min(works, num_multiprocessors() / T::kCluster);
  launch(gemm_kernel<kTokens, kRows, kMode, kGroups>, p, blocks, T::kThreads, T::kCluster,
         T::kSharedBytes, stream);
}

// The kernels there are, and the nanoseconds that they take on an H200: a step of a tile while its
// data are there, a round of tiles besides its steps, and all else. Fitted to the table in
// NOTES.md.
struct Choice {
  int tokens, rows;
  Mode mode;
  int groups;  // of K that it can take
  int step_ns, round_ns, start_ns;
  void (*launch)(KernelParams, Stream);
};

template <int kTokens, int kRows, Mode kMode, int kGroups>
constexpr Choice choice(int step_ns, int round_ns, int start_ns) {
  return {kTokens, kRows,    kMode,    kGroups,
          step_ns, round_ns, start_ns, launch_tiles<kTokens, kRows, kMode, kGroups>};
}

constexpr Choice kChoices[] = {
    choice<64, 64, Mode::kPair, 2>(150, 3000, 0),
    choice<128, 64, Mode::kPair, 2>(215, 2750, 0),
    choice<128, 128, Mode::kPair, 2>(240, 4750, 0),
    choice<64, 128, Mode::kAlone, 2>(200, 1250, 0),
    choice<128, 128, Mode::kAlone, 2>(340, 550, 2000),
    choice<192, 128, Mode::kShareTokens, 1>(545, 1500, 3000),
    choice<128, 256, Mode::kShareWeight, 1>(735, 1800, 2500),
    choice<128, 256, Mode::kShareWeight, 2>(745, 1000, 7400),
};

bool can_take(const Choice& choice, const KernelParams& p) {
  if (choice.mode == Mode::kPair) return p.groups == 2;
  if (choice.groups == 2 && choice.rows == 256) {  // of which some totals are in shared memory
    return p.groups == 2 && p.copies_out;
  }
  return p.groups <= choice.groups;
}

const Choice& choose(const KernelParams& p) {
  const int64_t processors = num_multiprocessors();
  const auto nanoseconds = [&](const Choice& choice) -> int64_t {
    if (!can_take(choice, p)) return INT64_MAX;
    // Tiles of the two blocks of a cluster: one of kPair, else two neighbours.
    const int parts = choice.mode == Mode::kPair ? 2 : 1;
    const int tokens = choice.tokens * (choice.mode == Mode::kShareWeight ? 2 : 1);
    const int rows = choice.rows * (choice.mode == Mode::kShareTokens ? 2 : 1);
    const int64_t works =
        int64_t{divide_up(p.gemm.t, tokens)} * divide_up(p.strips, rows / kStripRows);
    const int64_t blocks = works * (choice.mode == Mode::kAlone ? 1 : 2);
    const int64_t rounds = (blocks + processors - 1) / processors;
    if (parts > 1 && rounds > 1) return INT64_MAX;  // lone blocks go on without a pause
    // Of L2, a multiprocessor reads 110 bytes a nanosecond, and all together 11,000.
    const int64_t bytes = (std::min(p.gemm.t, choice.tokens) + choice.rows) * kStepK * 2;
    const int64_t copy_ns = bytes * std::max<int64_t>(100, std::min(blocks, processors)) / 11000;
    return choice.start_ns +
           rounds * (divide_up(p.steps, parts) * std::max<int64_t>(choice.step_ns, copy_ns) +
                     choice.round_ns);
  };
  return *std::min_element(std::begin(kChoices), std::end(kChoices),
                           [&](auto& a, auto& b) { return nanoseconds(a) < nanoseconds(b); });
}

KernelParams make_params(const GemmParams& m) {
  KernelParams p{};
  p.gemm = m;
  p.strips = divide_up(m.n, m.epilogue == GemmEpilogue::kGate ? 8 : kStripRows);
  p.tiles = divide_up(m.k, kTileK);
  p.steps = divide_up(m.k, kStepK);
  p.groups = num_groups(p.strips, p.steps);
  p.out_is_aligned = is_multiple(m.out, 16) && m.out_stride % (m.out_is_float ? 4 : 8) == 0;
  p.copies_out = p.out_is_aligned && !m.out_is_float && m.n % 8 == 0;
  p.x_is_aligned = is_multiple(m.x, 16) && m.x_stride % 8 == 0 && m.k % 8 == 0;
  return p;
}

void launch_portable(KernelParams p, Stream stream) {
  p.token_tiles = divide_up(p.gemm.t, kPortableTokens);
  p.row_tiles = divide_up(p.strips, kPortableRows / kStripRows);
  p.band = 16;
  launch(gemm_portable_kernel, p, p.token_tiles * p.row_tiles, kPortableWarps * 32, 1,
         kPortableStages * kPortableStageBytes, stream);
}

bool is_sm_90() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "device attribute");
  return major == 9;
}

}  // namespace

void gemm(const GemmParams& params, Stream stream) {
  if (params.t == 0 || params.n == 0) return;
  const KernelParams p = make_params(params);
  const bool rows_are_aligned = is_multiple(params.x, 16) && params.x_stride % 8 == 0;
  if (is_sm_90() && rows_are_aligned && params.k > 0 && params.x_stride >= params.k) {
    choose(p).launch(p, stream);
  } else {
    launch_portable(p, stream);
  }
}

}  // namespace tinyvllm::cuda
