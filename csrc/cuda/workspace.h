// Memory that a kernel needs between its blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tinyvllm::cuda {

// One per thread and device, allocated at that thread's first use of it and freed when the thread
// ends: never in steady state, and not while a graph is captured (call an op once before). Kernels
// of one thread share it, so they must follow each other on one stream; a graph holds its address,
// so it may be replayed for as long as the thread that captured it lives, and by it alone.
struct Workspace {
  static constexpr size_t kScratchBytes = size_t{64} << 20;
  static constexpr size_t kNumCounters = size_t{1} << 18;

  void* scratch;       // kScratchBytes, 256-byte aligned, contents undefined
  uint32_t* counters;  // [kNumCounters], zero between kernels: whoever counts up resets
};

// The calling thread's, on the current device. Throws std::runtime_error when there is no memory.
const Workspace& workspace();

// Of the current device: its multiprocessors, and whether it knows programmatic dependent launch.
int num_multiprocessors();
bool can_launch_early();

}  // namespace tinyvllm::cuda
