// Launching a kernel that may begin while the one before it ends.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "device.h"
#include "ops.h"
#include "workspace.h"

namespace tinyvllm::cuda {

// Launches `kernel`, which takes one params struct and calls wait_for_previous_kernels before it
// touches what kernels before it write (async_copy.cuh): from sm_90 on its blocks may be placed as
// soon as those of the kernel before it have called let_next_kernel_start.
// Asks for the largest shared memory, since kernels that divide L1 differently share no SM.
template <typename Params>
void launch_early(const char* op, void (*kernel)(Params), dim3 grid, int threads,
                  size_t shared_bytes, Stream stream, const Params& params) {
  const auto check = [op](cudaError_t error) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
  };
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = can_launch_early() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, params));
  check_launch(op);
}

}  // namespace tinyvllm::cuda
