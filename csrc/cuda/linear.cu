// out[t][n] = sum over k of x[t][k] * weight[n][k] (+ bias[n]), for up to 16 tokens: the weight is
// read once, so this kernel is a stream of weights at the speed of the memory.
//
// Layout. pack_linear cuts the weight into tiles of 8 output rows x 32 inputs, 512 bytes each:
//
//     packed [ceil(N/8) strips][ceil(K/32) tiles][8 rows][4 octets][8] bf16, zero padded
//
// so that the strip of 8 rows, or any part of its K, is one contiguous run of memory. Within a tile,
// octet o of row r lies at place o ^ (r / 2 % 4). Eight neighbouring lanes then read 16 bytes each
// from eight different bank groups, and the tile is also what `wgmma` calls 64-byte swizzle.
//
// The product. mma.m16n8k16 multiplies 16 tokens with 8 output rows over 16 inputs. Lane
// 4 * g + c holds tokens g and g + 8 on one side and output row g on the other, and of both the same
// four inputs; which four is free, as long as both sides agree. Here they are half an octet: lane
// (g, c) loads octet c of row g of the tile in one 16-byte load, and octet c of its tokens, and that
// feeds two mma. Result: tokens g, g + 8 of output rows 2c, 2c + 1.
//
// Mapping. K is split over the 8 consumer warps of a block, and if it is long over the blocks of a
// cluster, so that a warp's share of x (at most 8 tiles) stays in its registers. A cluster owns a
// range of strips. Every warp runs a ring of its own:
//
//     memory --bulk copies--> [chunk][chunk][chunk] --> 8 loads, 16 mma --> partial sums --,
//       ^                       | free again                                               v
//       '-----------------------'                     ninth warp: adds 8 partial sums, finishes
//
// A chunk is the warp's share of one strip, 4 KiB. No warp waits for another until the partial sums.
// The ring of a kernel is filled before it waits for the kernels before it, and it lets the next
// kernel start when it has asked for its last chunk: the memory never idles at the border.
//
// Every output is summed in one order, fixed by N and K: the bits of a row depend neither on the
// number of tokens nor on the other rows.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "async_copy.cuh"
#include "device.h"
#include "ops.h"

namespace tinyvllm::cuda {
namespace {

constexpr int kStripRows = 8;
constexpr int kTileK = 32;
constexpr int kTileBytes = kStripRows * kTileK * 2;
constexpr int kMaxTokens = 16;
constexpr int kWarps = 8;     // consumers
constexpr int kWarpTiles = 8;  // of K, per warp: x takes 4 registers a tile and 8 tokens
constexpr int kThreads = (kWarps + 2) * 32;
constexpr int kChunkBytes = kWarpTiles * kTileBytes;
constexpr int kPartials = 2;  // strips whose partial sums may wait for the ninth warp
constexpr int kGathers = 4;   // the same between the blocks of a cluster
constexpr int kMaxRing = 8;
constexpr int kMaxCluster = 8;

struct LinearParams {
  void* out;                  // [t, n] bf16 or f32
  const __nv_bfloat16* x;     // [t, k]
  const char* packed;         // [strips, tiles, 512 bytes]
  const __nv_bfloat16* bias;  // [n] or nullptr
  int64_t out_stride, x_stride;
  int t, n, k;
  uint32_t strips, tiles;
  uint32_t cluster;  // blocks that share K
  int passes;   // over x, where a cluster of warps cannot hold it
  int ring;     // chunks
  int early;    // chunks not yet asked for when the next kernel may start
  int ahead;    // chunks fetched into L2 beyond the ring, before the wait
  bool out_is_float, x_is_aligned, out_is_paired;
};

// ---- Shared memory ----------------------------------------------------------------------------

// A lane's part of the sums of a strip: tokens g and g + 8, two output rows each.
struct alignas(16) Sums {
  float v[4];
};

// Offsets in dynamic shared memory: rings | partial sums | sums of the cluster | barriers.
struct SharedPlan {
  int ring, partials, gathers, barriers, bytes;

  __host__ __device__ SharedPlan(int ring_chunks, int cluster) {
    constexpr int sums = 32 * sizeof(Sums);
    ring = 0;
    partials = kWarps * ring_chunks * kChunkBytes;
    gathers = partials + kPartials * kWarps * sums;
    barriers = gathers + (cluster > 1 ? kGathers * cluster * sums : 0);
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

// acc [16 tokens, 8 rows] += x [16 tokens, 16] * w [8 rows, 16]; x0, x2 are tokens 0-7, x1, x3
// tokens 8-15.
__device__ __forceinline__ void mma(float (&acc)[4], uint32_t x0, uint32_t x1, uint32_t x2,
                                    uint32_t x3, uint32_t w0, uint32_t w1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(w0), "r"(w1));
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

// Inputs k to k + 7 of a token where rows are not aligned or K ends within: zero past K.
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

// The share of x of a warp: octet c of `tiles` tiles from k on, tokens g and g + 8.
__device__ __forceinline__ void load_x(uint4 (&x)[2][kWarpTiles], const LinearParams& p,
                                       int g, int k, int tiles) {
  const __nv_bfloat16* row = p.x + g * p.x_stride + k;
  const auto valid = [&](int half, int i) {
    return g + 8 * half < p.t && i < tiles && k + i * kTileK < p.k;
  };
  if (p.x_is_aligned) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        x[half][i] = load_if(valid(half, i), row + 8 * half * p.x_stride + i * kTileK);
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const int left = valid(half, i) ? p.k - k - i * kTileK : 0;
        x[half][i] = load_odd_octet(row + 8 * half * p.x_stride + i * kTileK, left);
      }
    }
  }
}

__device__ __forceinline__ void store_pair(const LinearParams& p, int token, int n, float first,
                                           float second) {
  if (token >= p.t || n >= p.n) return;
  const int64_t at = token * p.out_stride + n;
  if (p.out_is_float) {
    float* out = static_cast<float*>(p.out) + at;
    if (p.out_is_paired) {
      *reinterpret_cast<float2*>(out) = {first, second};
      return;
    }
    out[0] = first;
    if (n + 1 < p.n) out[1] = second;
  } else {
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + at;
    if (p.out_is_paired) {
      *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(first, second);
      return;
    }
    out[0] = __float2bfloat16_rn(first);
    if (n + 1 < p.n) out[1] = __float2bfloat16_rn(second);
  }
}

// from[0] + from[32] + from[64] + ...: the sums of one lane, `count` of them, in order.
__device__ __forceinline__ Sums add_up(const Sums* from, int count) {
  Sums sums = from[0];
#pragma unroll
  for (int i = 1; i < count; ++i) {
    const Sums more = from[i * 32];
#pragma unroll
    for (int j = 0; j < 4; ++j) sums.v[j] += more.v[j];
  }
  return sums;
}

// ---- The kernel -------------------------------------------------------------------------------

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

// Two blocks fit on a multiprocessor, the second being the next kernel's: 96 registers a thread.
template <bool kOnePass>
__global__ void __launch_bounds__(kThreads, 2)
    linear_kernel(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(1024) char shared[];
  const SharedPlan plan(p.ring, p.cluster);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4;
  const uint32_t rank = p.cluster > 1 ? cluster_rank() : 0;
  const uint32_t base = shared_address(shared);
  const uint32_t ring_full = base + plan.barriers + 8 * kMaxRing * warp;     // [kMaxRing]
  const uint32_t partial_full = base + plan.barriers + 8 * kMaxRing * kWarps;  // [kPartials]
  const uint32_t partial_empty = partial_full + 8 * kPartials;  // [kPartials]
  const uint32_t gather_full = partial_empty + 8 * kPartials;   // [kGathers]
  const uint32_t gather_empty = gather_full + 8 * kGathers;     // [kMaxCluster][kGathers]

  // The strips of this cluster.
  const uint32_t clusters = gridDim.x / p.cluster, cluster = blockIdx.x / p.cluster;
  const int begin = static_cast<int>(cluster * p.strips / clusters);
  const int strips = static_cast<int>((cluster + 1) * p.strips / clusters) - begin;

  // The tiles of K of this warp, pass by pass, and its chunks: by strip, then by pass.
  const int passes = kOnePass ? 1 : p.passes;
  const uint32_t slices = p.cluster * kWarps * passes;
  const auto first_tile = [&](int pass, int of_warp) {
    const uint32_t slice = (pass * p.cluster + rank) * kWarps + of_warp;
    return static_cast<int>(slice * p.tiles / slices);
  };
  int first = first_tile(0, warp), tiles = first_tile(0, warp + 1) - first;
  const int items = strips * passes;
  const auto chunk = [&](int item) {
    const int strip = begin + item / passes;
    const int tile = kOnePass ? first : first_tile(item % passes, warp);
    return p.packed + (static_cast<int64_t>(strip) * p.tiles + tile) * kTileBytes;
  };
  const auto chunk_bytes = [&](int item) {
    const int pass = item % passes;
    return kTileBytes * (kOnePass ? tiles : first_tile(pass, warp + 1) - first_tile(pass, warp));
  };
  const uint32_t ring = base + plan.ring + warp * p.ring * kChunkBytes;
  const auto request = [&](int item, int slot) {
    const int bytes = chunk_bytes(item);
    if (bytes > 0) {
      warp_copy(ring + slot * kChunkBytes, chunk(item), bytes, ring_full + 8 * slot, lane);
    }
  };

  if (warp < kWarps) {
    if (lane < p.ring) barrier_init(ring_full + 8 * lane, kCopyArrivals);
    fence_barrier_init();
    __syncwarp();
#pragma unroll 1
    for (int item = 0; item < min(p.ring, items); ++item) request(item, item);
#pragma unroll 1
    for (int item = p.ring + lane; item < min(p.ring + p.ahead, items); item += 32) {
      if (chunk_bytes(item) > 0) prefetch_l2(chunk(item), chunk_bytes(item));
    }
  } else if (warp == kWarps) {
    if (lane < kPartials) {
      barrier_init(partial_full + 8 * lane, kWarps);
      barrier_init(partial_empty + 8 * lane, 1);
    }
    static_assert(kGathers * kMaxCluster <= 32);
    if (lane < kGathers) barrier_init(gather_full + 8 * lane, 1);
    if (lane < kGathers * kMaxCluster) barrier_init(gather_empty + 8 * lane, 1);
    fence_barrier_init();
  }
  if (p.cluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (p.ring + p.early >= items) let_next_kernel_start();
  wait_for_previous_kernels();

  if (warp < kWarps) {
    uint4 x[2][kWarpTiles];
    if (kOnePass) load_x(x, p, g, first * kTileK + c * 8, tiles);
    Cursor slot, partial;
    float acc[2][4] = {};
    for (int item = 0; item < items; ++item) {
      const int pass = item % passes;
      if (!kOnePass) {
        first = first_tile(pass, warp);
        tiles = first_tile(pass, warp + 1) - first;
        load_x(x, p, g, first * kTileK + c * 8, tiles);
      }
      if (tiles > 0) barrier_wait(ring_full + 8 * slot.at, slot.parity);
      const uint32_t from = ring + slot.at * kChunkBytes + g * 64 + ((c ^ (g / 2 % 4)) * 16);
      constexpr int kBatch = 2;  // loads before their products: as registers allow
#pragma unroll
      for (int i = 0; i < kWarpTiles; i += kBatch) {
        uint4 w[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          w[j] = {0, 0, 0, 0};
          if (i + j < tiles) w[j] = load_shared(from + (i + j) * kTileBytes);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const uint4 low = x[0][i + j], high = x[1][i + j];
          mma(acc[0], low.x, high.x, low.y, high.y, w[j].x, w[j].y);
          mma(acc[1], low.z, high.z, low.w, high.w, w[j].z, w[j].w);
        }
      }
      __syncwarp();  // every lane has read the chunk
      if (item + p.ring < items) request(item + p.ring, slot.at);
      if (item + p.ring + p.early + 1 == items) let_next_kernel_start();
      slot.next(p.ring);

      if (pass == passes - 1) {
        Sums sums;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.v[i] = acc[0][i] + acc[1][i];
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][i] = acc[1][i] = 0.0f;
        barrier_wait(partial_empty + 8 * partial.at, partial.parity ^ 1);
        auto* partials = reinterpret_cast<Sums*>(shared + plan.partials);
        partials[(partial.at * kWarps + warp) * 32 + lane] = sums;
        __syncwarp();
        if (lane == 0) barrier_arrive(partial_full + 8 * partial.at);
        partial.next(kPartials);
      }
    }
    return;
  }

  // Of strip i of the cluster, block i % cluster is the owner: it adds up the sums of the blocks.
  const auto* gathers = reinterpret_cast<const Sums*>(shared + plan.gathers);
  Cursor partial, gather;
  uint32_t owner = 0;
  for (int i = 0; i < strips; ++i) {
    const int n = (begin + i) * kStripRows + 2 * c;
    const uint32_t place = gather.at * p.cluster * 32 + lane;  // of block 0's sums in the owner
    float bias[2] = {0.0f, 0.0f};
    if (p.bias != nullptr) {
      if (n < p.n) bias[0] = __bfloat162float(p.bias[n]);
      if (n + 1 < p.n) bias[1] = __bfloat162float(p.bias[n + 1]);
    }
    Sums sums;
    if (warp == kWarps) {
      // The ninth warp adds up the block's warps, and if there is a cluster sends to the owner.
      const auto* partials = reinterpret_cast<const Sums*>(shared + plan.partials);
      barrier_wait(partial_full + 8 * partial.at, partial.parity);
      sums = add_up(&partials[partial.at * kWarps * 32 + lane], kWarps);
      __syncwarp();
      if (lane == 0) barrier_arrive(partial_empty + 8 * partial.at);
      partial.next(kPartials);
      if (p.cluster > 1) {
        barrier_wait_cluster(gather_empty + 8 * (owner * kGathers + gather.at), gather.parity ^ 1);
        const uint32_t to = shared_address(&gathers[place + rank * 32]);
        store_remote(in_block(to, owner), sums.v, in_block(gather_full + 8 * gather.at, owner));
      }
    } else if (owner == rank) {
      // The tenth warp adds up the cluster's blocks.
      if (lane == 0) barrier_expect(gather_full + 8 * gather.at, p.cluster * 32 * sizeof(sums));
      barrier_wait_cluster(gather_full + 8 * gather.at, gather.parity);
      sums = add_up(&gathers[place], p.cluster);
      __syncwarp();
      // Blocks that will send to this place again are told that it is free; others may be gone.
      if (lane < p.cluster && i + kGathers * p.cluster < strips) {
        barrier_arrive_remote(in_block(gather_empty + 8 * (rank * kGathers + gather.at), lane));
      }
    }
    if (owner == rank && (warp > kWarps || p.cluster == 1)) {
      store_pair(p, g, n, sums.v[0] + bias[0], sums.v[1] + bias[1]);
      store_pair(p, g + 8, n, sums.v[2] + bias[0], sums.v[3] + bias[1]);
    }
    if (++owner == p.cluster) {
      owner = 0;
      gather.next(kGathers);
    }
  }
}

// One thread per octet of the packed weight.
__global__ void pack_linear_kernel(uint4* packed, const __nv_bfloat16* weight, int64_t row_stride,
                                   int64_t n, int64_t k, int64_t tiles, int64_t octets,
                                   bool is_aligned) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < octets;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t place = i % 4, r = i / 4 % kStripRows, tile = i / (4 * kStripRows) % tiles;
    const int64_t row = i / (4 * kStripRows * tiles) * kStripRows + r;
    const int64_t first = tile * kTileK + (place ^ (r / 2 % 4)) * 8;
    const __nv_bfloat16* from = weight + row * row_stride + first;
    uint4 octet = {0, 0, 0, 0};
    if (row < n && is_aligned && first + 8 <= k) {
      octet = *reinterpret_cast<const uint4*>(from);
    } else if (row < n) {
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

// How a weight's work is divided: by its shape and the GPU alone.
struct LinearPlan {
  int cluster, passes, clusters, ring, early, ahead;
};

LinearPlan plan_linear(int strips, int tiles) {
  const bool has_clusters = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const int processors = attribute(cudaDevAttrMultiProcessorCount);
  constexpr int block_tiles = kWarps * kWarpTiles;
  LinearPlan plan{};
  plan.cluster = has_clusters ? std::clamp((tiles + block_tiles - 1) / block_tiles, 1, kMaxCluster) : 1;
  plan.passes = (tiles + block_tiles * plan.cluster - 1) / (block_tiles * plan.cluster);
  const int most = std::max(1, processors / plan.cluster);
  const int strips_each = (strips + most - 1) / most;
  plan.clusters = (strips + strips_each - 1) / strips_each;
  plan.ring = 3;
  plan.early = 0;
  plan.ahead = 0;
  return plan;
}

void launch(LinearParams p, const LinearPlan& plan, Stream stream) {
  const SharedPlan shared(plan.ring, plan.cluster);
  const auto kernel =
      plan.passes == 1 ? linear_kernel<true> : linear_kernel<false>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared.bytes),
        "shared memory");
  // The kernels of a step share multiprocessors only if they divide L1 and shared memory alike.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "shared memory");
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.clusters * plan.cluster);
  config.blockDim = dim3(plan.cluster > 1 ? kThreads : kThreads - 32);
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
  p.cluster = plan.cluster;
  p.passes = plan.passes;
  p.ring = plan.ring;
  p.early = plan.early;
  p.ahead = plan.ahead;
  check(cudaLaunchKernelEx(&config, kernel, p), "launch");
  check_launch("linear");
}

bool is_multiple(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

LinearParams params_of(const Tensor& out, const Tensor& x, const Tensor& packed,
                       const Tensor* bias) {
  LinearParams p{};
  p.out = out.data;
  p.x = x.ptr<__nv_bfloat16>();
  p.packed = packed.ptr<char>();
  p.bias = bias == nullptr ? nullptr : bias->ptr<__nv_bfloat16>();
  p.out_stride = out.strides[0];
  p.x_stride = x.strides[0];
  p.k = static_cast<int>(x.shape[1]);
  p.t = static_cast<int>(x.shape[0]);
  p.n = static_cast<int>(out.shape[1]);
  p.strips = static_cast<uint32_t>((out.shape[1] + kStripRows - 1) / kStripRows);
  p.tiles = static_cast<uint32_t>((x.shape[1] + kTileK - 1) / kTileK);
  p.out_is_float = out.dtype == DType::kFloat32;
  p.x_is_aligned = is_multiple(p.x, 16) && p.k % 8 == 0 && (p.t == 1 || p.x_stride % 8 == 0);
  p.out_is_paired = is_multiple(p.out, p.out_is_float ? 8 : 4) && p.n % 2 == 0 &&
                    (p.t == 1 || p.out_stride % 2 == 0);
  return p;
}

}  // namespace

void pack_linear(const Tensor& packed, const Tensor& weight, Stream stream) {
  const int64_t n = weight.shape[0], k = weight.shape[1], row_stride = weight.strides[0];
  const int64_t tiles = (k + kTileK - 1) / kTileK;
  const int64_t octets = (n + kStripRows - 1) / kStripRows * tiles * (kTileBytes / 16);
  if (octets == 0) return;
  const bool is_aligned = is_multiple(weight.data, 16) && row_stride % 8 == 0;
  const int64_t blocks = std::min<int64_t>((octets + 255) / 256, 1 << 16);
  pack_linear_kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
      packed.ptr<uint4>(), weight.ptr<__nv_bfloat16>(), row_stride, n, k, tiles, octets,
      is_aligned);
  check_launch("pack_linear");
}

void linear(const Tensor& out, const Tensor& x, const Tensor& packed, const Tensor* bias,
            Stream stream) {
  LinearParams p = params_of(out, x, packed, bias);
  if (out.numel() == 0) return;
  const LinearPlan plan = plan_linear(p.strips, p.tiles);
  const int out_size = p.out_is_float ? 4 : 2;
  for (int64_t first = 0; first < x.shape[0]; first += kMaxTokens) {
    p.t = static_cast<int>(std::min<int64_t>(x.shape[0] - first, kMaxTokens));
    p.x = x.ptr<__nv_bfloat16>() + first * p.x_stride;
    p.out = out.ptr<char>() + first * p.out_stride * out_size;
    launch(p, plan, stream);
  }
}

}  // namespace tinyvllm::cuda
