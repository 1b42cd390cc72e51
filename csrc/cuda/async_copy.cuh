// Copies that run by themselves, and the barriers that tell when they are done.
//
// From sm_90 on, one thread asks the copy engine for kilobytes (cp.async.bulk), and the engine
// counts the bytes in on an mbarrier. Before, every lane of the warp copies its 16-byte share
// (cp.async) and its arrival on the mbarrier is delayed until they are there. Either way the reader
// waits for a phase of the mbarrier, so the kernels above are written once.
//
// Addresses of shared memory are 32-bit here, as the instructions take them.
#pragma once

#include <cstdint>

namespace tinyvllm::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TINYVLLM_BULK_COPY 1
#else
#define TINYVLLM_BULK_COPY 0
#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers --------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that were just initialised visible to the copy engine and to other blocks.
__device__ __forceinline__ void fence_barrier_init() {
#if TINYVLLM_BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}

// Returns once the phase of this parity is complete: 0 for the first, 1 for the second, 0 again.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
#if TINYVLLM_BULK_COPY
#define TINYVLLM_WAIT "try_wait"  // suspends the thread for a while
#else
#define TINYVLLM_WAIT "test_wait"
#endif
    asm volatile("{ .reg .pred p; mbarrier." TINYVLLM_WAIT
                 ".parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#undef TINYVLLM_WAIT
  }
}

// ---- Copies from global to shared memory ------------------------------------------------------

// Arrivals that a barrier expects from one warp_copy.
constexpr int kCopyArrivals = TINYVLLM_BULK_COPY ? 1 : 32;

// The whole warp calls this. `bytes` is a multiple of 16, or 0, as are both addresses. What is
// copied is read once: it does not stay in L2 at the cost of what is read again.
__device__ __forceinline__ void warp_copy(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier, int lane) {
#if TINYVLLM_BULK_COPY
  if (lane == 0) {
    uint64_t read_once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
    asm volatile(
        "{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(barrier),
        "r"(bytes)
        : "memory");
    if (bytes > 0) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1], %2, [%3], %4;" ::"r"(to),
          "l"(from), "r"(bytes), "r"(barrier), "l"(read_once)
          : "memory");
    }
  }
#else
  for (uint32_t i = lane * 16; i < bytes; i += 32 * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i),
                 "l"(static_cast<const char*>(from) + i)
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// ---- Programmatic dependent launch ------------------------------------------------------------

// Until here a kernel may only touch what no kernel before it in the stream writes.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if TINYVLLM_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once every block has said so: it then waits as above.
__device__ __forceinline__ void let_next_kernel_start() {
#if TINYVLLM_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Clusters: blocks that reach each other's shared memory -------------------------------------

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if TINYVLLM_BULK_COPY
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// Which cluster of the grid.
__device__ __forceinline__ int cluster_index() {
  uint32_t index = 0;
#if TINYVLLM_BULK_COPY
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return static_cast<int>(index);
}

// A barrier for all threads of the cluster, in two steps: each thread does both, once.
__device__ __forceinline__ void cluster_arrive() {
#if TINYVLLM_BULK_COPY
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if TINYVLLM_BULK_COPY
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address of the same variable in the block of that rank.
__device__ __forceinline__ uint32_t in_block(uint32_t address, int rank) {
  uint32_t result = address;
#if TINYVLLM_BULK_COPY
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
#endif
  return result;
}

// barrier_wait for what other blocks did: slower, since it empties L1.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if TINYVLLM_BULK_COPY
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier_in_block) {
#if TINYVLLM_BULK_COPY
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_in_block)
      : "memory");
#endif
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
#if TINYVLLM_BULK_COPY
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(barrier),
               "r"(bytes)
               : "memory");
#endif
}

// Stores four floats in another block's shared memory and counts their bytes on its barrier.
__device__ __forceinline__ void store_remote(uint32_t to, float4 v, uint32_t barrier) {
#if TINYVLLM_BULK_COPY
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
#endif
}

}  // namespace tinyvllm::cuda
