// out[t][n] = sum over k of x[t][k] * weight[n][k] for many tokens, and what follows it: a bias,
// the residual, or silu(gate) * up.
//
// Layout. The weight is what pack_linear makes (linear.cu): [strips][tiles of 32 inputs][16 rows]
// [4 octets swizzled][8] bf16. A tile's swizzle is the one that `wgmma` calls 64-byte, so tiles of
// neighbouring strips, put one after the other in shared memory, are an operand as they are.
//
// Mapping. A block makes tiles of kTokens tokens x kRows weight rows. One thread asks the copy
// engine for K in steps of 64, the weight without waiting for the kernels before; one warpgroup per
// 64 tokens multiplies:
//
//     x, packed --tensor copies--> [step][step][step]... --wgmma--> registers --> epilogue --> out
//       ^                             | free again
//       '-----------------------------'
//
// Two ways of sharing the work, Mode:
//
//     kAlone  as many blocks as find room, each takes one tile after the other
//     kSplit  for few tokens, which make few tiles: the blocks of a cluster make one tile, each a
//             range of K, and add up through each other's shared memory
//
// Order of summation. num_groups cuts K into up to 8 ranges, by the weight's shape alone. A range
// is summed from front to back, 16 inputs at a time, then the ranges are added, first to last. All
// modes and tiles keep to that, and so does gemm_portable_kernel, which runs before and after
// sm_90 and where x is not aligned (mma.sync and wgmma round alike, NOTES.md). So the bits of a row
// depend neither on the number of tokens nor on the other rows.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "device.h"
#include "gemm.h"
#include "tensor_cores.cuh"
#include "workspace.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kStripRows = 16;
constexpr int kTileK = 32;
constexpr int kTileBytes = kStripRows * kTileK * 2;
constexpr int kStepK = 64;  // 128 bytes of a token, two tiles of a strip
constexpr int kStepTiles = kStepK / kTileK;
constexpr int kMaxGroups = 8;

enum class Mode { kAlone, kSplit };

struct KernelParams {
  CUtensorMap x_map;  // [t][k], boxes of x_rows x 64, 128-byte swizzle
  CUtensorMap w_map;  // [tiles][strips][1 KiB], boxes of whole tiles
  GemmParams gemm;
  int strips, tiles, steps, groups;
  int token_tiles, row_tiles;
  int x_rows;  // tokens of a box: kTokens, or all of fewer. Rows after that hold anything, and what
               // becomes of them is not stored (boxes that reach beyond x are slow)
  bool out_is_aligned, x_is_aligned;
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

__device__ __forceinline__ void store_columns(uint32_t (&words)[4], const KernelParams& p,
                                              int token, int column, int c) {
  const GemmParams& m = p.gemm;
  auto* out = static_cast<__nv_bfloat16*>(m.out);
  const int row = token + 8 * (c / 2), first = column + 8 * (c % 2);
  transpose_quad(words, c);
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

__device__ __forceinline__ void store_floats(const KernelParams& p, int token, int column,
                                             float low, float high) {
  const GemmParams& m = p.gemm;
  if (token >= m.t || column >= m.n) return;
  float* to = static_cast<float*>(m.out) + token * m.out_stride + column;
  if (p.out_is_aligned && column + 1 < m.n) {
    *reinterpret_cast<float2*>(to) = {low, high};
  } else {
    to[0] = low;
    if (column + 1 < m.n) to[1] = high;
  }
}

__device__ __forceinline__ float bias_at(const GemmParams& m, int column, int offset) {
  return m.bias != nullptr && column < m.n ? __bfloat162float(m.bias[offset + column]) : 0.0f;
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// What kAdd adds to, for two neighbouring strips: loaded before the sums are there, and before any
// store to out, which would hold up the loads that follow it.
using Residual = uint32_t[2][4];

__device__ __forceinline__ void load_residual(Residual& residual, const KernelParams& p, int token,
                                              int strip, int c) {
  if (p.gemm.epilogue != GemmEpilogue::kAdd) return;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    load_columns(residual[s], p, token, (strip + s) * kStripRows, c);
  }
}

// Finishes the sums of tokens `token` and `token` + 8 and two neighbouring strips, the first even.
__device__ __forceinline__ void finish(const float (&v)[16], Residual& residual,
                                       const KernelParams& p, int token, int strip, int c) {
  const GemmParams& m = p.gemm;
  if (strip >= p.strips) return;
  if (m.epilogue == GemmEpilogue::kGate) {
    uint32_t words[4];
    const int column = strip * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = column + 8 * j + 2 * c;
      const float gate[2] = {bias_at(m, at, 0), bias_at(m, at + 1, 0)};
      const float up[2] = {bias_at(m, at, m.n), bias_at(m, at + 1, m.n)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* sums = &v[8 * j + 2 * i];
        words[2 * i + j] = pack_bf16(silu(sums[0] + gate[0]) * (sums[4] + up[0]),
                                     silu(sums[1] + gate[1]) * (sums[5] + up[1]));
      }
    }
    store_columns(words, p, token, column, c);
    return;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int column = (strip + s) * kStripRows;
    if (strip + s >= p.strips) break;
    float sums[8];  // as words: token, half of the strip, one of two
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sums[4 * i + 2 * j + e] =
              v[8 * s + 4 * j + 2 * i + e] + bias_at(m, column + 8 * j + 2 * c + e, 0);
        }
      }
    }
    if (m.out_is_float) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_floats(p, token + 8 * (i / 2), column + 8 * (i % 2) + 2 * c, sums[2 * i],
                     sums[2 * i + 1]);
      }
      continue;
    }
    uint32_t (&words)[4] = residual[s];
    if (m.epilogue == GemmEpilogue::kAdd) {
      transpose_quad(words, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[2 * i] += __uint_as_float(words[i] << 16);
        sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_bf16(sums[2 * i], sums[2 * i + 1]);
    store_columns(words, p, token, column, c);
  }
}

// The steps of K of a group.
__device__ __forceinline__ int first_step(const KernelParams& p, int group) {
  return static_cast<int>(static_cast<int64_t>(group) * p.steps / p.groups);
}

// Which tile is the i-th: bands of kBand token tiles, so that tiles made at the same time share
// weight rows as well as tokens.
struct TilePlace {
  int token_tile, row_tile;
};

__device__ __forceinline__ TilePlace tile_place(int i, int token_tiles, int row_tiles) {
  constexpr int kBand = 16;
  const int band = i / (kBand * row_tiles), in_band = i - band * kBand * row_tiles;
  const int width = min(kBand, token_tiles - band * kBand);
  return {band * kBand + in_band % width, in_band / width};
}

// ---- sm_90: tensor copies and wgmma -----------------------------------------------------------

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TINYVLLM_WGMMA 1
#else
#define TINYVLLM_WGMMA 0
#endif

template <int kTokens, int kRows, Mode kMode>
struct Tile {
  static constexpr int kConsumers = kTokens / 64;  // warpgroups
  static constexpr int kXBytes = kTokens * kStepK * 2;
  static constexpr int kWBytes = kRows * kStepK * 2;
  // Room for a second block: fewer clusters of 4 fit than there are multiprocessors (NOTES.md), and
  // the copies of one kernel run while the one before it ends.
  static constexpr int kBlocks = kMode == Mode::kSplit && kTokens == 64 ? 2 : 1;
  // Two consumers and one block: setmaxnreg, which moves registers between whole warpgroups.
  static constexpr bool kMovesRegisters = kConsumers == 2 && kBlocks == 1;
  static constexpr int kThreads = 128 * kConsumers + (kMovesRegisters ? 128 : 32);
  static constexpr int kStages = 192 * 1024 / kBlocks / (kXBytes + kWBytes);
  static constexpr int kSharedBytes = kStages * (kXBytes + kWBytes + 16);
  // Sums of the groups of K before, beside those of this one: where there are registers for them.
  static constexpr bool kHasTotals = kMode == Mode::kAlone && kRows == 128;
};

#if TINYVLLM_WGMMA
// A matrix in shared memory for wgmma: rows of 64 or 128 swizzled bytes (layout 2 or 1), of which
// eight take group_bytes.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t group_bytes,
                                             uint64_t layout) {
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{group_bytes >> 4} << 32 |
         layout << 62;
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

// A barrier for the threads of a cluster that publishes no stores.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ float4 load_remote(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
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

// The thread that fills the ring.
template <int kTokens, int kRows, Mode kMode>
__device__ __forceinline__ void produce(const KernelParams& p, uint32_t ring, uint32_t full,
                                        uint32_t empty, uint32_t rank, int work, int works,
                                        int work_stride) {
  using T = Tile<kTokens, kRows, kMode>;
  const auto load_w = [&](const TilePlace& tile, int step, int slot) {
    const uint32_t to = ring + slot * (T::kXBytes + T::kWBytes) + T::kXBytes;
    barrier_expect(full + 8 * slot, p.x_rows * kStepK * 2 + T::kWBytes);
    copy_w(to, &p.w_map, tile.row_tile * (kRows / kStripRows), step * kStepTiles, full + 8 * slot);
  };
  const auto load_x = [&](const TilePlace& tile, int step, int slot) {
    copy_x(ring + slot * (T::kXBytes + T::kWBytes), &p.x_map, step * kStepK,
           tile.token_tile * kTokens, full + 8 * slot);
  };
  const int begin = kMode == Mode::kSplit ? first_step(p, rank) : 0;
  const int end = kMode == Mode::kSplit ? first_step(p, rank + 1) : p.steps;
  const int early = work < works ? min(T::kStages, end - begin) : 0;
  TilePlace tile = tile_place(work, p.token_tiles, p.row_tiles);
  for (int i = 0; i < early; ++i) load_w(tile, begin + i, i);
  let_next_kernel_start();
  wait_for_previous_kernels();
  for (int i = 0; i < early; ++i) load_x(tile, begin + i, i);
  Slot<T::kStages> slot;
  int step = begin + early;
  slot.at = early % T::kStages;
  slot.parity = early / T::kStages;
  for (; work < works; work += work_stride) {
    tile = tile_place(work, p.token_tiles, p.row_tiles);
    for (; step < end; ++step) {
      barrier_wait(empty + 8 * slot.at, slot.parity ^ 1);
      load_w(tile, step, slot.at);
      load_x(tile, step, slot.at);
      slot.next();
    }
    step = begin;
  }
}
#endif  // TINYVLLM_WGMMA

// Registers: 65,536 over the threads of kBlocks; kMovesRegisters gives the producer's away. Dynamic
// shared memory: ring [x | weight] and its barriers.
template <int kTokens, int kRows, Mode kMode>
__global__ void __launch_bounds__(Tile<kTokens, kRows, kMode>::kThreads,
                                  Tile<kTokens, kRows, kMode>::kBlocks)
    gemm_kernel(const __grid_constant__ KernelParams p) {
#if TINYVLLM_WGMMA
  using T = Tile<kTokens, kRows, kMode>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t ring = shared_address(shared);
  const uint32_t full = ring + T::kStages * (T::kXBytes + T::kWBytes);
  const uint32_t empty = full + 8 * T::kStages;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t rank = kMode == Mode::kAlone ? 0 : cluster_rank();
  const int cluster = kMode == Mode::kAlone ? 1 : p.groups;
  const int first_work = blockIdx.x / cluster, work_stride = gridDim.x / cluster;
  const int works = p.token_tiles * p.row_tiles;

  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, T::kConsumers * 4);
    }
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == T::kConsumers) {
    if constexpr (T::kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && lane == 0) {
      produce<kTokens, kRows, kMode>(p, ring, full, empty, rank, first_work, works, work_stride);
    }
    if constexpr (kMode == Mode::kSplit) {
      __syncwarp();
      cluster_sync();
    }
  } else {
    if constexpr (T::kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous_kernels();
    constexpr bool kLoadsEarly = kRows <= 128;  // the residual: where there are registers
    float acc[kRows / 2];
    Slot<T::kStages> slot;
    const int g = lane / 4, c = lane % 4;
    const auto release = [&](int at) {
      if (lane == 0) barrier_arrive(empty + 8 * at);
    };
    // acc = the sum of a range of steps.
    const auto multiply = [&](int begin, int end) {
      int before = 0;
      for (int step = begin; step < end; ++step) {
        barrier_wait(full + 8 * slot.at, slot.parity);
        const uint32_t x = ring + slot.at * (T::kXBytes + T::kWBytes) + warpgroup * 64 * 128;
        const uint32_t w = ring + slot.at * (T::kXBytes + T::kWBytes) + T::kXBytes;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kStepK / 16; ++i) {
          wgmma(acc, describe(x + i * 32, 1024, 1),
                describe(w + i / 2 * (T::kWBytes / 2) + i % 2 * 32, 512, 2), step > begin || i > 0);
        }
        wgmma_commit();
        if (step > begin) {
          wgmma_wait<1>();
          release(before);
        }
        before = slot.at;
        slot.next();
      }
      wgmma_wait<0>();
      release(before);
    };
    for (int work = first_work; work < works; work += work_stride) {
      const TilePlace tile = tile_place(work, p.token_tiles, p.row_tiles);
      const int token = tile.token_tile * kTokens + warpgroup * 64 + warp * 16 + g;
      const int strip = tile.row_tile * (kRows / kStripRows);
      // Of a split tile's pairs of strips, the block finishes every cluster-th.
      constexpr int kPairs = kRows / 32;
      const auto pair_of = [&](int i) { return kMode == Mode::kSplit ? rank + i * cluster : i; };
      Residual residual[kPairs];
      const auto load_residuals = [&] {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          if (pair_of(i) < kPairs) load_residual(residual[i], p, token, strip + 2 * pair_of(i), c);
        }
      };
      if constexpr (kLoadsEarly) load_residuals();
      if constexpr (kMode == Mode::kSplit) {
        multiply(first_step(p, rank), first_step(p, rank + 1));
      } else if constexpr (T::kHasTotals) {
        float total[kRows / 2];
        multiply(first_step(p, 0), first_step(p, 1));
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) total[i] = acc[i];
        for (int group = 1; group < p.groups; ++group) {
          multiply(first_step(p, group), first_step(p, group + 1));
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) total[i] += acc[i];
        }
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) acc[i] = total[i];
      } else {
        multiply(0, p.steps);
      }
      if constexpr (kMode == Mode::kSplit) {
        // Every thread leaves its sums where the same thread of the other blocks finds them. All
        // steps have been read by now, so the ring is free.
        constexpr int kPlane = T::kConsumers * 128 * 16;  // bytes of one float4 of every consumer
        const uint32_t mine = ring + threadIdx.x * 16;
        asm volatile("bar.sync 1, %0;" ::"n"(T::kConsumers * 128) : "memory");
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * kPlane),
                       "f"(acc[4 * i]), "f"(acc[4 * i + 1]), "f"(acc[4 * i + 2]),
                       "f"(acc[4 * i + 3])
                       : "memory");
        }
        cluster_sync();
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int pair = pair_of(i);
          if (pair >= kPairs) break;
          float sums[16];
#pragma unroll 4
          for (int from = 0; from < cluster; ++from) {
            const uint32_t theirs = in_block(mine + pair * 4 * kPlane, from);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float4 v = load_remote(theirs + j * kPlane);
              sums[4 * j] = from == 0 ? v.x : sums[4 * j] + v.x;
              sums[4 * j + 1] = from == 0 ? v.y : sums[4 * j + 1] + v.y;
              sums[4 * j + 2] = from == 0 ? v.z : sums[4 * j + 2] + v.z;
              sums[4 * j + 3] = from == 0 ? v.w : sums[4 * j + 3] + v.w;
            }
          }
          finish(sums, residual[i], p, token, strip + 2 * pair, c);
        }
      } else {
        if constexpr (!kLoadsEarly) load_residuals();
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          float sums[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) sums[i] = acc[16 * pair + i];
          finish(sums, residual[pair], p, token, strip + 2 * pair, c);
        }
      }
    }
  }
  if constexpr (kMode == Mode::kSplit) {
    __syncwarp();
    cluster_sync_relaxed();  // no block leaves while another still reads or writes its shared
                             // memory
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
  const TilePlace tile = tile_place(blockIdx.x, p.token_tiles, p.row_tiles);
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
#pragma unroll
  for (int pair = 0; pair < kPortableRows / 32; ++pair) {
    float sums[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = total[pair * 4 + i / 4][i % 4];
    const int token = first_token + warp * 16 + g, strip = first_strip + 2 * pair;
    Residual residual;
    load_residual(residual, p, token, strip, c);
    finish(sums, residual, p, token, strip, c);
  }
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

// Ranges of K: as many as give every multiprocessor of a large GPU a block of 64 weight rows, of
// at least 512 inputs. A constant, not the GPU's own number: bits should not depend on that.
int num_groups(int strips, int steps) {
  constexpr int kBlocks = 132, kMinSteps = 8;
  const int blocks = kBlocks / divide_up(strips, 4);
  return std::clamp(std::min(blocks, steps / kMinSteps), 1, kMaxGroups);
}

// cuTensorMapEncodeTiled, from the driver that is there: nothing is linked to it.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
#else
    check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
#endif
    if (result != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw std::runtime_error(
          "gemm: the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or newer");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return encoder;
}

template <int kDims>
void encode(CUtensorMap& map, CUtensorMapDataType type, const void* data,
            const cuuint64_t (&shape)[kDims], const cuuint64_t (&strides)[kDims - 1],
            const cuuint32_t (&box)[kDims], CUtensorMapSwizzle swizzle) {
  cuuint32_t element_strides[kDims];
  std::fill_n(element_strides, kDims, 1);
  const CUresult result =
      tensor_map_encoder()(&map, type, kDims, const_cast<void*>(data), shape, strides, box,
                           element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("gemm: cuTensorMapEncodeTiled: error " + std::to_string(result));
  }
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

template <int kTokens, int kRows, Mode kMode>
void launch_tiles(KernelParams p, Stream stream) {
  using T = Tile<kTokens, kRows, kMode>;
  const GemmParams& m = p.gemm;
  p.token_tiles = divide_up(m.t, kTokens);
  p.row_tiles = divide_up(p.strips, kRows / kStripRows);
  p.x_rows = std::min(m.t, kTokens);
  encode<2>(p.x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, m.x,
            {static_cast<cuuint64_t>(m.k), static_cast<cuuint64_t>(m.t)},
            {static_cast<cuuint64_t>(m.x_stride) * 2}, {kStepK, static_cast<cuuint32_t>(p.x_rows)},
            CU_TENSOR_MAP_SWIZZLE_128B);
  const cuuint64_t tiles = static_cast<cuuint64_t>(p.tiles);
  encode<3>(p.w_map, CU_TENSOR_MAP_DATA_TYPE_UINT32, m.packed,
            {kTileBytes / 4, static_cast<cuuint64_t>(p.strips), tiles},
            {tiles * kTileBytes, kTileBytes}, {kTileBytes / 4, kRows / kStripRows, kStepTiles},
            CU_TENSOR_MAP_SWIZZLE_NONE);
  const int works = p.token_tiles * p.row_tiles;
  const int cluster = kMode == Mode::kSplit ? p.groups : 1;
  const int blocks =
      kMode == Mode::kSplit ? works * cluster : std::min(works, num_multiprocessors());
  launch(gemm_kernel<kTokens, kRows, kMode>, p, blocks, T::kThreads, cluster, T::kSharedBytes,
         stream);
}

// The kernels there are, and what they take in cycles of one H200: a step of a tile, and a round of
// tiles besides its steps. Fitted to the table in NOTES.md.
struct Choice {
  int tokens, rows;
  Mode mode;
  int blocks;  // at the same time on a multiprocessor
  bool takes_groups;
  int step_cycles, round_cycles;
  void (*launch)(KernelParams, Stream);
};

template <int kTokens, int kRows, Mode kMode>
constexpr Choice choice(int step_cycles, int round_cycles) {
  using T = Tile<kTokens, kRows, kMode>;
  const bool takes_groups = kMode == Mode::kSplit || T::kHasTotals;
  return {kTokens,      kRows,       kMode,        T::kBlocks,
          takes_groups, step_cycles, round_cycles, launch_tiles<kTokens, kRows, kMode>};
}

constexpr Choice kChoices[] = {
    choice<64, 64, Mode::kSplit>(450, 6000),   choice<128, 64, Mode::kSplit>(420, 7000),
    choice<64, 128, Mode::kAlone>(360, 6000),  choice<64, 256, Mode::kAlone>(600, 5000),
    choice<128, 128, Mode::kAlone>(550, 6000), choice<128, 256, Mode::kAlone>(1060, 9000),
};

const Choice& choose(const KernelParams& p) {
  const int64_t processors = num_multiprocessors();
  const auto cycles = [&](const Choice& choice) -> int64_t {
    if (p.groups > 1 && !choice.takes_groups) return INT64_MAX;
    const int groups = choice.mode == Mode::kSplit ? p.groups : 1;
    const int64_t blocks = int64_t{divide_up(p.gemm.t, choice.tokens)} *
                           divide_up(p.strips, choice.rows / kStripRows) * groups;
    // Larger clusters leave a tenth of the places empty.
    const int64_t places = processors * choice.blocks * (groups > 2 ? 10 : 11) / 11;
    const int64_t rounds = (blocks + places - 1) / places;
    const int64_t sharing =
        std::min<int64_t>(choice.blocks, (blocks + processors - 1) / processors);
    return rounds * (int64_t{divide_up(p.steps, groups)} * choice.step_cycles * sharing +
                     choice.round_cycles);
  };
  return *std::min_element(std::begin(kChoices), std::end(kChoices),
                           [&](const Choice& a, const Choice& b) { return cycles(a) < cycles(b); });
}

KernelParams make_params(const GemmParams& m) {
  KernelParams p{};
  p.gemm = m;
  p.strips = divide_up(m.n, m.epilogue == GemmEpilogue::kGate ? 8 : kStripRows);
  p.tiles = divide_up(m.k, kTileK);
  p.steps = divide_up(m.k, kStepK);
  p.groups = num_groups(p.strips, p.steps);
  p.out_is_aligned =
      is_multiple(m.out, m.out_is_float ? 8 : 16) && m.out_stride % (m.out_is_float ? 2 : 8) == 0;
  p.x_is_aligned = is_multiple(m.x, 16) && m.x_stride % 8 == 0 && m.k % 8 == 0;
  return p;
}

void launch_portable(KernelParams p, Stream stream) {
  p.token_tiles = divide_up(p.gemm.t, kPortableTokens);
  p.row_tiles = divide_up(p.strips, kPortableRows / kStripRows);
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
