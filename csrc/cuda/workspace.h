// Memory that a kernel needs between its blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tinyvllm::cuda {

// One per thread and device, allocated at that thread's first use of it and freed by
// release_workspace or when the thread ends: never in steady state, and not while a graph is
// captured (call an op once before). Kernels of one thread share it, so they must follow each other
// on one stream; a graph holds its address, so it may be replayed until it is freed, and by the
// thread that captured it alone.
struct Workspace {
  static constexpr size_t kScratchBytes = size_t{64} << 20;
  static constexpr size_t kNumCounters = size_t{1} << 18;
  static constexpr size_t kBytes = kScratchBytes + kNumCounters * sizeof(uint32_t);

  void* scratch;       // kScratchBytes, 256-byte aligned, contents undefined
  uint32_t* counters;  // [kNumCounters], zero between kernels: whoever counts up resets
};

// The calling thread's, on the current device. Throws std::runtime_error when there is no memory.
const Workspace& workspace();

// Frees the calling thread's workspace on the current device, once the kernels that use it are
// done; graphs captured with it must not be replayed any more. Returns its bytes, 0 without one.
size_t release_workspace();

// Of the current device: its multiprocessors, the shared memory that a block may have, its
// generation (9 for sm_90), and whether it knows programmatic dependent launch.
int num_multiprocessors();
int max_shared_bytes();
int compute_capability_major();
bool can_launch_early();

}  // namespace tinyvllm::cuda
