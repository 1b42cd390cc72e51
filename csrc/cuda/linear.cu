// out[t][n] = sum over k of x[t][k] * weight[n][k] (+ bias[n]), for up to 16 tokens: the weight is
// read once, so this kernel is a stream of weights at the speed of the memory.
//
// What stands around a linear in a model is fused: rms_norm of x where a block holds all of K (else
// its kernel runs before), out += the sum, or silu(gate) * up, where a strip is 8 rows of gate and
// the 8 rows of up that belong to them. Behind qkv_proj the heads are rotated and the new keys and
// values stored: the two halves of a head that rotation pairs are strips, which a block takes as a
// pair.
//
// Layout. pack_linear cuts the weight into tiles of 16 output rows x 32 inputs, 1 KiB each:
//
//     packed [ceil(N/16) strips][ceil(K/32) tiles][16 rows][4 octets][8] bf16, zero padded
//
// so that a strip of 16 rows, or any part of its K, is one contiguous run of memory. Within a tile,
// octet o of row r lies at place o ^ (r / 2 % 4): eight neighbouring lanes that read 16 bytes each
// hit eight different groups of banks. (It is also what `wgmma` calls 64-byte swizzle.)
//
// The product. mma.m16n8k16 multiplies 16 output rows with 8 tokens over 16 inputs. Lane 4 * g + c
// holds output rows g and g + 8 on one side and token g on the other, and of all of them the same
// four inputs; which four is free, as long as both sides agree. Here they are half an octet: lane
// (g, c) loads octet c of its rows and of its token in 16-byte loads, and that feeds two mma.
// Result: output rows g, g + 8 of tokens 2c, 2c + 1.
//
// Mapping. K is split over the 8 consumer warps of a block, and if it is long over the blocks of a
// cluster, so that a warp's share of x (at most 8 tiles) stays in its registers. A cluster owns a
// range of strips. Every warp runs a ring of its own:
//
//     memory --bulk copies--> [chunk][chunk][chunk] --> loads, mma --> partial sums --,
//       ^                       | free again                                          v
//       '-----------------------'                    ninth warp: adds 8 partial sums, finishes
//
// A chunk is half of the warp's share of one strip, at most 4 KiB. No warp waits for another until
// the partial sums. The ring of a kernel is filled before it waits for the kernels before it, and
// it lets the next kernel start before its own end, so that the memory idles less at the border:
// how much is left there is in NOTES.md. More than 16 tokens go to gemm.cu.
//
// Every output is summed in one order, fixed by N and K: the bits of a row depend neither on the
// number of tokens, up to 16, nor on the other rows.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "device.h"
#include "gemm.h"
#include "ops.h"
#include "tensor_cores.cuh"

namespace tinyvllm::cuda {
namespace {

constexpr int kStripRows = 16;
constexpr int kGatedRows = 8;  // of gate, and of up, in a strip of a gated weight
constexpr int kTileK = 32;
constexpr int kTileBytes = kStripRows * kTileK * 2;
constexpr int kMaxTokens = 16;
constexpr int kWarps = 8;      // consumers
constexpr int kWarpTiles = 8;  // of K, per warp: x takes 4 registers a tile and 8 tokens
constexpr int kChunkTiles = 4;
constexpr int kChunks = kWarpTiles / kChunkTiles;  // of a warp's share of a strip
constexpr int kChunkBytes = kChunkTiles * kTileBytes;
constexpr int kPartials = 2;  // strips whose partial sums may wait for the ninth warp
constexpr int kGathers = 2;   // the same between the blocks of a cluster
constexpr int kMaxRing = 16;
constexpr int kMaxCluster = 8;
// Lanes that arrive on a barrier for their warp, after a __syncwarp. compute-sanitizer's racecheck
// does not see that one speaks for all, and finds nothing when all of them arrive.
#ifdef TINYVLLM_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
constexpr int kMaxDevices = 64;

using Epilogue = GemmEpilogue;

// `total` things in `parts` runs of equal length, up to one: divided on the host.
struct Share {
  int each, extra;

  Share() = default;
  Share(int total, int parts) : each(total / parts), extra(total % parts) {}
  __device__ int begin(int part) const { return part * each + min(part, extra); }
};

// What rotary_embedding.cu does, of a linear whose rows are the heads of q, k and v.
struct RopeParams {
  __nv_bfloat16 *k_cache, *v_cache;  // [num_slots, num_kv_heads, head_dim]
  const float* cos_sin;              // [max_model_len, head_dim]
  const int32_t* positions;          // [t]
  const int32_t* slot_mapping;       // [t]
  int64_t num_slots, max_model_len;
  int num_heads, num_kv_heads, head_dim;
  int half_strips;  // of half a head
};

struct LinearParams {
  void* out;                  // [t, n] bf16, or f32 with kStore
  const __nv_bfloat16* x;     // [t, k]
  const char* packed;         // [strips, tiles, 1 KiB]
  const __nv_bfloat16* bias;  // [n], [2, n] with kGate, or nullptr
  int64_t out_stride, x_stride;
  int t, n, k;
  const __nv_bfloat16* norm_weight;  // [k] or nullptr
  float eps;
  Share strips;      // of the weight, over the clusters; pairs of them with rope
  Share tiles;       // of K, over the warps of a cluster and their passes
  int row_tiles;     // of a strip
  uint32_t cluster;  // blocks that share K
  int passes;        // over x, where a cluster of warps cannot hold it
  int ring;          // chunks
  int early;         // chunks not yet asked for when the next kernel may start
  bool out_is_float, x_is_aligned;
  Epilogue epilogue;
  RopeParams rope;
};

// ---- Shared memory ----------------------------------------------------------------------------

// Offsets in dynamic shared memory: rings | partial sums | sums of the cluster | barriers.
template <int kTokens>
struct SharedPlan {
  static constexpr int kSumBytes = kStripRows * kTokens * 4;  // a strip's sums, fp32
  int partials, gathers, barriers, bytes;

  __host__ __device__ SharedPlan(int ring, int cluster) {
    partials = kWarps * ring * kChunkBytes;
    gathers = partials + kPartials * kWarps * kSumBytes;
    barriers = gathers + (cluster > 1 ? kGathers * cluster * kSumBytes : 0);
    bytes = barriers + 8 * (kWarps * kMaxRing + 2 * kPartials + kGathers * (1 + kMaxCluster));
  }
};

// ---- Device helpers ---------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// acc [16 rows, 8 tokens] += w [16 rows, 16] * x [8 tokens, 16]; w0, w2 are rows 0-7, w1, w3 rows
// 8-15.
__device__ __forceinline__ void mma(float (&acc)[4], uint32_t w0, uint32_t w1, uint32_t w2,
                                    uint32_t w3, uint32_t x0, uint32_t x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));
}

// 16 bytes, or zeros. A predicate, not a branch: a warp's loads must all be under way at once.
__device__ __forceinline__ uint4 load_if(bool valid, const __nv_bfloat16* from) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
  return v;
}

// The first `left` values of an octet where rows are not aligned or K ends within; then zeros.
__device__ __noinline__ uint4 load_odd_octet(const __nv_bfloat16* from, int left) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < left ? __bfloat16_as_ushort(from[2 * i]) : 0;
    const uint32_t high = 2 * i + 1 < left ? __bfloat16_as_ushort(from[2 * i + 1]) : 0;
    words[i] = low | high << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// A lane's part of the x of a warp: an octet of `tiles` tiles from k on, of tokens g, g + 8.
template <int kTokens, bool kAligned>
__device__ __forceinline__ void load_x(uint4 (&x)[kTokens / 8][kWarpTiles], const LinearParams& p,
                                       int g, int k, int tiles) {
  const __nv_bfloat16* row = p.x + g * p.x_stride + k;
  const auto left = [&](int half, int i) {
    return g + 8 * half < p.t && i < tiles ? p.k - k - i * kTileK : 0;
  };
  if (kAligned || p.x_is_aligned) {
#pragma unroll
    for (int half = 0; half < kTokens / 8; ++half) {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        x[half][i] = load_if(left(half, i) > 0, row + 8 * half * p.x_stride + i * kTileK);
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < kTokens / 8; ++half) {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        x[half][i] = load_odd_octet(row + 8 * half * p.x_stride + i * kTileK, left(half, i));
      }
    }
  }
}

// from[0] + from[stride] + from[2 * stride] + ..., in this order.
__device__ __forceinline__ float4 add_up(const float4* from, int stride, int count) {
  float4 sum = from[0];
#pragma unroll 8
  for (int i = 1; i < count; ++i) {
    const float4 more = from[i * stride];
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  }
  return sum;
}

// What out holds before, if it is added to.
__device__ __forceinline__ float load_value(const LinearParams& p, int token, int n) {
  if (p.epilogue != Epilogue::kAdd || token >= p.t || n >= p.n) return 0.0f;
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p.out)[token * p.out_stride + n]);
}

__device__ __forceinline__ void store_value(const LinearParams& p, int token, int n, float value) {
  if (token >= p.t || n >= p.n) return;
  const int64_t at = token * p.out_stride + n;
  if (p.out_is_float) {
    static_cast<float*>(p.out)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(value);
  }
}

// Where the i-th strip lies of those that begin with the given one, or with the given pair.
template <bool kRope>
__device__ __forceinline__ int strip_at(const LinearParams& p, int begin, int i) {
  if (!kRope) return begin + i;
  const int pair = begin + i / 2, half = p.rope.half_strips;
  return pair / half * 2 * half + pair % half + i % 2 * half;
}

__device__ __forceinline__ float round_bf16(float v) {
  return __bfloat162float(__float2bfloat16_rn(v));
}

// Rotation angles of a token at inputs d and d + 8 of a head: cos, cos, sin, sin.
__device__ __forceinline__ float4 load_angles(const LinearParams& p, int token, int d) {
  if (token >= p.t) return {};
  const int64_t position = p.rope.positions[token];
  if (position < 0 || position >= p.rope.max_model_len) return {};
  const float* row = p.rope.cos_sin + position * p.rope.head_dim + d;
  const int half = p.rope.head_dim / 2;
  return {row[0], row[8], row[half], row[half + 8]};
}

// Row n of q, k or v and the row half a head further on, of a token: rotated, q to out, k and v to
// their slot. The products are rounded one by one: the bits of rotary_embedding.cu, which likewise
// leaves alone what has no position.
__device__ __forceinline__ void store_rotated(const LinearParams& p, int token, int n, float first,
                                              float second, float cos, float sin) {
  if (token >= p.t) return;
  const RopeParams& rope = p.rope;
  const int head = n / rope.head_dim, half = rope.head_dim / 2;
  const bool is_q = head < rope.num_heads, is_v = head >= rope.num_heads + rope.num_kv_heads;
  const int64_t position = rope.positions[token];
  const bool is_known = position >= 0 && position < rope.max_model_len;
  if (!is_v && is_known) {
    const float x1 = first, x2 = second;
    first = __fsub_rn(__fmul_rn(x1, cos), __fmul_rn(x2, sin));
    second = __fadd_rn(__fmul_rn(x2, cos), __fmul_rn(x1, sin));
  }
  __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + token * p.out_stride + n;
  if (!is_q) {
    const int64_t slot = rope.slot_mapping[token];
    if (!is_known || slot < 0 || slot >= rope.num_slots) return;
    const int kv_row = n - (rope.num_heads + (is_v ? rope.num_kv_heads : 0)) * rope.head_dim;
    to = (is_v ? rope.v_cache : rope.k_cache) + slot * rope.num_kv_heads * rope.head_dim + kv_row;
  }
  to[0] = __float2bfloat16_rn(first);
  to[half] = __float2bfloat16_rn(second);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// x = rms_norm(x), rounded to bf16. The 8 warps hold all of K; `weight` is laid out as x is.
// sums [kWarps][kTokens] is scratch of the block.
template <int kTokens>
__device__ __forceinline__ void normalize(uint4 (&x)[kTokens / 8][kWarpTiles],
                                          const uint4 (&weight)[kWarpTiles], float (*sums)[kTokens],
                                          int k, float eps, int warp, int lane) {
  const int g = lane / 4;
#pragma unroll
  for (int half = 0; half < kTokens / 8; ++half) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const uint32_t words[4] = {x[half][i].x, x[half][i].y, x[half][i].z, x[half][i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = low_half(words[j]), high = high_half(words[j]);
        sum[j] += low * low + high * high;
      }
    }
    float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (lane % 4 == 0) sums[warp][8 * half + g] = all;
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");  // the consumers alone
#pragma unroll
  for (int half = 0; half < kTokens / 8; ++half) {
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) all += sums[i][8 * half + g];
    const float scale = 1.0f / sqrtf(all / static_cast<float>(k) + eps);
    const auto scaled = [scale](uint32_t v, uint32_t w) {
      return pack_bf16(low_half(v) * scale * low_half(w), high_half(v) * scale * high_half(w));
    };
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const uint4 v = x[half][i], w = weight[i];
      x[half][i] = {scaled(v.x, w.x), scaled(v.y, w.y), scaled(v.z, w.z), scaled(v.w, w.w)};
    }
  }
}

// exp(-x) overflows to infinity for x < -88, where x / inf is the zero that is wanted.
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// A position in a ring of `size` and the parity of its barrier's phase.
struct Cursor {
  int at = 0;
  uint32_t parity = 0;

  __device__ void next(int size) {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
};

// ---- The kernel -------------------------------------------------------------------------------

// One block a multiprocessor: rings of 4 chunks leave no room for two. Dynamic shared memory:
// SharedPlan. kNorm, kRope: one block holds all of K.
template <int kTokens, bool kOnePass, bool kNorm, bool kRope>
__global__ void __launch_bounds__((kWarps + 2) * 32, 1)
    linear_kernel(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float norm_sums[kWarps][kTokens];
  constexpr int kHalves = kTokens / 8;
  const SharedPlan<kTokens> plan(p.ring, p.cluster);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4;
  const uint32_t rank = p.cluster > 1 ? cluster_rank() : 0;
  const uint32_t base = shared_address(shared);
  const uint32_t ring_full = base + plan.barriers + 8 * kMaxRing * warp;       // [kMaxRing]
  const uint32_t partial_full = base + plan.barriers + 8 * kMaxRing * kWarps;  // [kPartials]
  const uint32_t partial_empty = partial_full + 8 * kPartials;                 // [kPartials]
  const uint32_t gather_full = partial_empty + 8 * kPartials;                  // [kGathers]
  const uint32_t gather_empty = gather_full + 8 * kGathers;  // [kMaxCluster][kGathers]

  // The strips of this cluster.
  const int cluster = p.cluster > 1 ? cluster_index() : static_cast<int>(blockIdx.x);
  const int begin = p.strips.begin(cluster);
  const int strips = (p.strips.begin(cluster + 1) - begin) * (kRope ? 2 : 1);

  // The tiles of K of this warp, pass by pass.
  const int passes = kOnePass ? 1 : p.passes;
  const auto first_tile = [&](int pass, int of_warp) {
    return p.tiles.begin(static_cast<int>((pass * p.cluster + rank) * kWarps + of_warp));
  };
  int first = first_tile(0, warp), tiles = first_tile(0, warp + 1) - first;
  const int turns = strips * passes, items = turns * kChunks;

  // The chunks of this warp, in the order of their requests: by strip, by pass, then by K.
  const uint32_t ring = base + warp * p.ring * kChunkBytes;
  const int64_t strip_bytes = static_cast<int64_t>(p.row_tiles) * kTileBytes;
  const char* next = p.packed + strip_at<kRope>(p, begin, 0) * strip_bytes + first * kTileBytes;
  int next_part = 0, next_tiles = tiles, next_turn = 0;
  const auto skip_chunk = [&] {
    next += kChunkBytes;
    if (++next_part < kChunks) return;
    next_part = 0;
    if (kOnePass && !kRope) {
      next += strip_bytes - kChunks * kChunkBytes;
    } else if (++next_turn < turns) {
      const int pass = next_turn % passes, from = first_tile(pass, warp);
      next_tiles = first_tile(pass, warp + 1) - from;
      next = p.packed + strip_at<kRope>(p, begin, next_turn / passes) * strip_bytes +
             from * kTileBytes;
    }
  };
  const auto chunk_bytes = [&] {
    return min(max(next_tiles - next_part * kChunkTiles, 0), kChunkTiles) * kTileBytes;
  };
  const auto request = [&](int slot) {
    warp_copy(ring + slot * kChunkBytes, next, chunk_bytes(), ring_full + 8 * slot, lane);
    skip_chunk();
  };

  if (warp < kWarps) {
    if (lane < p.ring) barrier_init(ring_full + 8 * lane, kCopyArrivals);
    fence_barrier_init();
    __syncwarp();
#pragma unroll 1
    for (int item = 0; item < min(p.ring, items); ++item) request(item);
  } else if (warp == kWarps) {
    if (lane < kPartials) {
      barrier_init(partial_full + 8 * lane, kWarps * kWarpArrivals);
      barrier_init(partial_empty + 8 * lane, kWarpArrivals);
    }
    static_assert(kGathers * kMaxCluster <= 32);
    if (lane < kGathers) barrier_init(gather_full + 8 * lane, 1);
    if (lane < kGathers * kMaxCluster) barrier_init(gather_empty + 8 * lane, 1);
    fence_barrier_init();
  }
  if (p.cluster > 1) cluster_arrive();  // the barriers are there: waited for before their use
  __syncthreads();
  if (p.ring + p.early >= items) let_next_kernel_start();
  uint4 norm_weight[kWarpTiles];
  if (kNorm && warp < kWarps) {
    const __nv_bfloat16* from = p.norm_weight + first * kTileK + c * 8;
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const int left = i < tiles ? p.k - first * kTileK - c * 8 - i * kTileK : 0;
      norm_weight[i] = load_if(left > 0, from + i * kTileK);
    }
  }
  wait_for_previous_kernels();

  auto* partials = reinterpret_cast<float4*>(shared + plan.partials);
  auto* gathers = reinterpret_cast<float4*>(shared + plan.gathers);
  if (warp < kWarps) {
    uint4 x[kHalves][kWarpTiles];
    if (kOnePass) load_x<kTokens, kNorm>(x, p, g, first * kTileK + c * 8, tiles);
    if (kNorm) normalize<kTokens>(x, norm_weight, norm_sums, p.k, p.eps, warp, lane);
    if (p.cluster > 1) cluster_wait();
    float acc[kHalves][4] = {};
    Cursor slot, partial;
    int item = 0;
    const uint32_t in_tile = g * 64 + ((c ^ (g / 2 % 4)) * 16);  // row g + 8 lies 512 bytes on
    for (int turn = 0; turn < turns; ++turn) {
      if (!kOnePass) {
        first = first_tile(turn % passes, warp);
        tiles = first_tile(turn % passes, warp + 1) - first;
        load_x<kTokens, kNorm>(x, p, g, first * kTileK + c * 8, tiles);
      }
#pragma unroll
      for (int part = 0; part < kChunks; ++part) {
        barrier_wait(ring_full + 8 * slot.at, slot.parity);
        const uint32_t from = ring + slot.at * kChunkBytes + in_tile;
#pragma unroll
        for (int i = 0; i < kChunkTiles; ++i) {
          const int tile = part * kChunkTiles + i;
          uint4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
          if (tile < tiles) {
            low = load_shared(from + i * kTileBytes);
            high = load_shared(from + i * kTileBytes + 512);
          }
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            const uint4 v = x[half][tile];
            mma(acc[half], low.x, high.x, low.y, high.y, v.x, v.y);
            mma(acc[half], low.z, high.z, low.w, high.w, v.z, v.w);
          }
        }
        __syncwarp();  // every lane has read the chunk
        if (item + p.ring < items) request(slot.at);
        if (item + p.ring + p.early + 1 == items) let_next_kernel_start();
        slot.next(p.ring);
        ++item;
      }
      if (kOnePass || turn % passes == passes - 1) {
        barrier_wait(partial_empty + 8 * partial.at, partial.parity ^ 1);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          partials[((partial.at * kWarps + warp) * kHalves + half) * 32 + lane] = {
              acc[half][0], acc[half][1], acc[half][2], acc[half][3]};
          for (int i = 0; i < 4; ++i) acc[half][i] = 0.0f;
        }
        __syncwarp();
        if (lane < kWarpArrivals) barrier_arrive(partial_full + 8 * partial.at);
        partial.next(kPartials);
      }
    }
    return;
  }

  if (p.cluster > 1) cluster_wait();
  // Of strip i of the cluster, block i % cluster is the owner: it adds up the sums of the blocks.
  Cursor partial, gather;
  uint32_t owner = 0;
  float4 first_half[kHalves];  // of a head's rows and with it how they turn
  float4 angles[2 * kHalves];
  for (int i = 0; i < strips; ++i) {
    const bool gated = p.epilogue == Epilogue::kGate;
    const int n = strip_at<kRope>(p, begin, i) * (gated ? kGatedRows : kStripRows) + g;
    if (kRope && i % 2 == 0) {
#pragma unroll
      for (int j = 0; j < 2 * kHalves; ++j) {
        angles[j] = load_angles(p, j / 2 * 8 + 2 * c + j % 2, n % p.rope.head_dim);
      }
    }
    float bias[2] = {0.0f, 0.0f};  // of this lane's rows g and g + 8
    if (p.bias != nullptr) {
      if (n < p.n) bias[0] = __bfloat162float(p.bias[n]);
      const int second = gated ? p.n + n : n + 8;
      if (gated ? n < p.n : second < p.n) bias[1] = __bfloat162float(p.bias[second]);
    }
    const bool stores = owner == rank && (warp > kWarps || p.cluster == 1);
    float old[kHalves][4] = {};  // asked for before the wait for the sums
    if (stores) {
#pragma unroll
      for (int j = 0; j < 4 * kHalves; ++j) {
        old[j / 4][j % 4] = load_value(p, j / 4 * 8 + 2 * c + j % 2, n + j % 4 / 2 * 8);
      }
    }
    const int place = gather.at * p.cluster * kHalves * 32 + lane;  // of block 0's sums
    float4 sums[kHalves];
    if (warp == kWarps) {
      // The ninth warp adds up the block's warps, and if there is a cluster sends to the owner.
      barrier_wait(partial_full + 8 * partial.at, partial.parity);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int at = (partial.at * kWarps * kHalves + half) * 32 + lane;
        sums[half] = add_up(&partials[at], kHalves * 32, kWarps);
      }
      __syncwarp();
      if (lane < kWarpArrivals) barrier_arrive(partial_empty + 8 * partial.at);
      partial.next(kPartials);
      if (p.cluster > 1) {
        barrier_wait_cluster(gather_empty + 8 * (owner * kGathers + gather.at), gather.parity ^ 1);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint32_t to = shared_address(&gathers[place + (rank * kHalves + half) * 32]);
          store_remote(in_block(to, owner), sums[half],
                       in_block(gather_full + 8 * gather.at, owner));
        }
      }
    } else if (owner == rank) {
      // The tenth warp adds up the cluster's blocks.
      if (lane == 0) barrier_expect(gather_full + 8 * gather.at, p.cluster * plan.kSumBytes);
      barrier_wait_cluster(gather_full + 8 * gather.at, gather.parity);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        sums[half] = add_up(&gathers[place + half * 32], kHalves * 32, p.cluster);
      }
      __syncwarp();
      // Blocks that will send to this place again are told that it is free; others may be gone.
      if (lane < p.cluster && i + kGathers * p.cluster < strips) {
        barrier_arrive_remote(in_block(gather_empty + 8 * (rank * kGathers + gather.at), lane));
      }
    }
    if (kRope) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float4 v = {round_bf16(sums[half].x + bias[0]), round_bf16(sums[half].y + bias[0]),
                          round_bf16(sums[half].z + bias[1]), round_bf16(sums[half].w + bias[1])};
        const float4 u = first_half[half], even = angles[2 * half], odd = angles[2 * half + 1];
        first_half[half] = v;
        if (i % 2 == 0) continue;
        const int token = 8 * half + 2 * c, row = n - p.rope.head_dim / 2;
        store_rotated(p, token, row, u.x, v.x, even.x, even.z);
        store_rotated(p, token + 1, row, u.y, v.y, odd.x, odd.z);
        store_rotated(p, token, row + 8, u.z, v.z, even.y, even.w);
        store_rotated(p, token + 1, row + 8, u.w, v.w, odd.y, odd.w);
      }
    } else if (stores) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int token = 8 * half + 2 * c;
        if (gated) {
          store_value(p, token, n, silu(sums[half].x + bias[0]) * (sums[half].z + bias[1]));
          store_value(p, token + 1, n, silu(sums[half].y + bias[0]) * (sums[half].w + bias[1]));
          continue;
        }
        store_value(p, token, n, sums[half].x + bias[0] + old[half][0]);
        store_value(p, token + 1, n, sums[half].y + bias[0] + old[half][1]);
        store_value(p, token, n + 8, sums[half].z + bias[1] + old[half][2]);
        store_value(p, token + 1, n + 8, sums[half].w + bias[1] + old[half][3]);
      }
    }
    if (++owner == p.cluster) {
      owner = 0;
      gather.next(kGathers);
    }
  }
}

// One thread per octet of the packed weight. n: rows of the weight, of one half if it is gated.
__global__ void pack_linear_kernel(uint4* packed, const __nv_bfloat16* weight, int64_t row_stride,
                                   int64_t n, int64_t k, int64_t tiles, int64_t octets,
                                   bool is_gated, bool is_aligned) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < octets;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t place = i % 4, r = i / 4 % kStripRows, tile = i / (4 * kStripRows) % tiles;
    const int64_t strip = i / (4 * kStripRows * tiles);
    const int64_t of_half = strip * kGatedRows + r % kGatedRows;
    const bool exists = is_gated ? of_half < n : strip * kStripRows + r < n;
    const int64_t row = !is_gated ? strip * kStripRows + r : r < kGatedRows ? of_half : n + of_half;
    const int64_t first = tile * kTileK + (place ^ (r / 2 % 4)) * 8;
    const __nv_bfloat16* from = weight + row * row_stride + first;
    uint4 octet = {0, 0, 0, 0};
    if (exists && is_aligned && first + 8 <= k) {
      octet = *reinterpret_cast<const uint4*>(from);
    } else if (exists) {
      auto* values = reinterpret_cast<__nv_bfloat16*>(&octet);
      for (int j = 0; j < 8 && first + j < k; ++j) values[j] = from[j];
    }
    packed[i] = octet;
  }
  __threadfence();  // the next kernel may be a `linear`, which reads its weight without waiting
}

// ---- Launching --------------------------------------------------------------------------------

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("linear: ") + what + ": " + cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&value, which, device), "device attribute");
  return value;
}

// How a weight's work is divided: by its shape and the GPU alone, so that its bits are, too.
struct LinearPlan {
  int cluster, passes, clusters, ring, early;
};

// Clusters of that many blocks that run at once, one block a multiprocessor: fewer than a division
// says, since a cluster lies within one of the GPU's groups of multiprocessors.
int max_clusters(int cluster) {
  const int processors = attribute(cudaDevAttrMultiProcessorCount);
  if (cluster == 1) return processors;
  static std::atomic<int> known[kMaxDevices][kMaxCluster + 1];
  int device = 0;
  check(cudaGetDevice(&device), "device");
  std::atomic<int>* entry = device < kMaxDevices ? &known[device][cluster] : nullptr;
  if (entry != nullptr && entry->load() != 0) return entry->load();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(processors / cluster * cluster));
  config.blockDim = dim3(32 * (kWarps + 2));
  config.dynamicSmemBytes = SharedPlan<8>(4, cluster).bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = linear_kernel<8, true, false, false>;
  int count = 0;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(config.dynamicSmemBytes)),
        "shared memory");
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "clusters");
  count = std::clamp(count, 1, std::max(1, processors / cluster));
  if (entry != nullptr) entry->store(count);
  return count;
}

LinearPlan plan_linear(int strips, int tiles) {
  constexpr int block_tiles = kWarps * kWarpTiles;
  const auto blocks_for = [](int n, int each) { return std::max(1, (n + each - 1) / each); };
  const bool has_clusters = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  LinearPlan plan{};
  plan.cluster = has_clusters ? std::min(blocks_for(tiles, block_tiles), kMaxCluster) : 1;
  plan.passes = blocks_for(tiles, block_tiles * plan.cluster);
  plan.clusters = std::min(strips, max_clusters(plan.cluster));
  // What was fastest on an H200 (NOTES.md), or as much of it as fits.
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int rest = SharedPlan<kMaxTokens>(0, plan.cluster).bytes;
  plan.ring = std::clamp((most - rest) / (kWarps * kChunkBytes), 1, 4);
  plan.early = 2;
  return plan;
}

template <int kTokens>
void launch(const LinearParams& p, const LinearPlan& plan, int clusters, Stream stream) {
  const SharedPlan<kTokens> shared(plan.ring, plan.cluster);
  const auto kernel = p.rope.cos_sin != nullptr  ? linear_kernel<kTokens, true, true, true>
                      : p.norm_weight != nullptr ? linear_kernel<kTokens, true, true, false>
                      : plan.passes == 1         ? linear_kernel<kTokens, true, false, false>
                                                 : linear_kernel<kTokens, false, false, false>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared.bytes),
        "shared memory");
  // The kernels of a step share multiprocessors only if they divide L1 and shared memory alike.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "shared memory");
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * plan.cluster);
  config.blockDim = dim3(32 * (kWarps + (plan.cluster > 1 ? 2 : 1)));
  config.dynamicSmemBytes = shared.bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
    ++config.numAttrs;
  }
  check(cudaLaunchKernelEx(&config, kernel, p), "launch");
  check_launch("linear");
}

bool is_multiple(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

void pack(const Tensor& packed, const Tensor& weight, bool is_gated, Stream stream) {
  const int64_t n = weight.shape[0] / (is_gated ? 2 : 1), k = weight.shape[1];
  const int64_t tiles = packed.shape[1], octets = packed.numel() / 8;
  if (octets == 0) return;
  const bool is_aligned = is_multiple(weight.data, 16) && weight.strides[0] % 8 == 0;
  const int64_t blocks = std::min<int64_t>((octets + 255) / 256, 1 << 16);
  pack_linear_kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
      packed.ptr<uint4>(), weight.ptr<__nv_bfloat16>(), weight.strides[0], n, k, tiles, octets,
      is_gated, is_aligned);
  check_launch("pack_linear");
}

// A norm in front of a linear: its weight, and room for its result where it is not fused.
struct Norm {
  const Tensor& normed;
  const Tensor& weight;
  float eps;
};

// More tokens than a launch of this kernel takes.
void run_gemm(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias,
              Epilogue epilogue, Stream stream) {
  GemmParams p{};
  p.out = out.data;
  p.x = x.ptr<__nv_bfloat16>();
  p.packed = packed.data;
  p.bias = bias == nullptr ? nullptr : bias->ptr<__nv_bfloat16>();
  p.out_stride = out.strides[0];
  p.x_stride = x.strides[0];
  p.t = static_cast<int>(x.shape[0]);
  p.n = static_cast<int>(out.shape[1]);
  p.k = static_cast<int>(x.shape[1]);
  p.out_is_float = out.dtype == DType::kFloat32;
  p.epilogue = epilogue;
  gemm(p, stream);
}

bool is_aligned(const Tensor& t) {
  return is_multiple(t.data, 16) && t.shape[t.ndim - 1] % 8 == 0 &&
         (t.ndim == 1 || t.strides[0] % 8 == 0);
}

bool can_fuse_norm(const LinearPlan& plan, const Tensor& x, const Tensor& norm_weight) {
  return plan.cluster == 1 && plan.passes == 1 && x.shape[0] <= kMaxTokens && is_aligned(x) &&
         is_aligned(norm_weight);
}

// rope: fused too, which needs a norm that can be.
void run_linear(const Tensor& out, const Tensor& x, const Norm* norm, const Tensor& packed,
                const Tensor* bias, Epilogue epilogue, Stream stream,
                const RopeParams* rope = nullptr) {
  if (out.numel() == 0) return;
  const int strips = static_cast<int>(packed.shape[0]), tiles = static_cast<int>(packed.shape[1]);
  const LinearPlan plan = plan_linear(strips, tiles);
  if (norm != nullptr && !can_fuse_norm(plan, x, norm->weight)) {
    rms_norm(norm->normed, x, norm->weight, norm->eps, stream);
    run_linear(out, norm->normed, nullptr, packed, bias, epilogue, stream);
    return;
  }
  if (x.shape[0] > kMaxTokens) {
    run_gemm(out, x, packed, bias, epilogue, stream);
    return;
  }
  LinearParams p{};
  p.out = out.data;
  p.x = x.ptr<__nv_bfloat16>();
  p.packed = packed.ptr<char>();
  p.bias = bias == nullptr ? nullptr : bias->ptr<__nv_bfloat16>();
  p.out_stride = out.strides[0];
  p.x_stride = x.strides[0];
  p.k = static_cast<int>(x.shape[1]);
  p.n = static_cast<int>(out.shape[1]);
  if (norm != nullptr) {
    p.norm_weight = norm->weight.ptr<__nv_bfloat16>();
    p.eps = norm->eps;
  }
  const int units = rope != nullptr ? strips / 2 : strips;
  const int clusters = std::min(units, plan.clusters);
  p.strips = Share(units, clusters);
  p.tiles = Share(tiles, plan.cluster * kWarps * plan.passes);
  p.row_tiles = tiles;
  p.cluster = plan.cluster;
  p.passes = plan.passes;
  p.ring = plan.ring;
  p.early = plan.early;
  p.out_is_float = out.dtype == DType::kFloat32;
  p.x_is_aligned = is_aligned(x);
  p.epilogue = epilogue;
  if (rope != nullptr) p.rope = *rope;
  p.t = static_cast<int>(x.shape[0]);
  p.t <= 8 ? launch<8>(p, plan, clusters, stream) : launch<16>(p, plan, clusters, stream);
}

}  // namespace

void pack_linear(const Tensor& packed, const Tensor& weight, Stream stream) {
  pack(packed, weight, false, stream);
}

void pack_gated_linear(const Tensor& packed, const Tensor& weight, Stream stream) {
  pack(packed, weight, true, stream);
}

void linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias,
            Stream stream) {
  run_linear(out, x, nullptr, packed, bias, Epilogue::kStore, stream);
}

void linear_add(const Tensor& residual, const Tensor& x, const Tensor& packed, const Tensor* bias,
                Stream stream) {
  run_linear(residual, x, nullptr, packed, bias, Epilogue::kAdd, stream);
}

void norm_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                 const Tensor& norm_weight, const Tensor& packed, const Tensor* bias, float eps,
                 Stream stream) {
  const Norm norm{normed, norm_weight, eps};
  run_linear(out, x, &norm, packed, bias, Epilogue::kStore, stream);
}

void norm_linear_rope_store_kv(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& normed, const Tensor& x, const Tensor& norm_weight,
                               const Tensor& packed, const Tensor* bias, const Tensor& cos_sin,
                               const Tensor& positions, const Tensor& slot_mapping, float eps,
                               Stream stream) {
  const int64_t num_kv_heads = k_cache.shape[2], head_dim = k_cache.shape[3];
  const int64_t num_heads = qkv.shape[1] / head_dim - 2 * num_kv_heads;
  const LinearPlan plan =
      plan_linear(static_cast<int>(packed.shape[0]), static_cast<int>(packed.shape[1]));
  if (head_dim % (2 * kStripRows) != 0 || !can_fuse_norm(plan, x, norm_weight)) {
    norm_linear(qkv, normed, x, norm_weight, packed, bias, eps, stream);
    rotary_embedding_store_kv(heads_of(qkv, 0, num_heads, head_dim),
                              heads_of(qkv, num_heads, num_kv_heads, head_dim),
                              heads_of(qkv, num_heads + num_kv_heads, num_kv_heads, head_dim),
                              k_cache, v_cache, cos_sin, positions, slot_mapping, stream);
    return;
  }
  RopeParams rope{};
  rope.k_cache = k_cache.ptr<__nv_bfloat16>();
  rope.v_cache = v_cache.ptr<__nv_bfloat16>();
  rope.cos_sin = cos_sin.ptr<float>();
  rope.positions = positions.ptr<int32_t>();
  rope.slot_mapping = slot_mapping.ptr<int32_t>();
  rope.num_slots = k_cache.shape[0] * k_cache.shape[1];
  rope.max_model_len = cos_sin.shape[0];
  rope.num_heads = static_cast<int>(num_heads);
  rope.num_kv_heads = static_cast<int>(num_kv_heads);
  rope.head_dim = static_cast<int>(head_dim);
  rope.half_strips = rope.head_dim / 2 / kStripRows;
  const Norm norm{normed, norm_weight, eps};
  run_linear(qkv, x, &norm, packed, bias, Epilogue::kStore, stream, &rope);
}

void norm_gated_linear(const Tensor& out, const Tensor& normed, const Tensor& x,
                       const Tensor& norm_weight, const Tensor& packed, const Tensor* bias,
                       float eps, Stream stream) {
  const Norm norm{normed, norm_weight, eps};
  run_linear(out, x, &norm, packed, bias, Epilogue::kGate, stream);
}

}  // namespace tinyvllm::cuda
