#include "workspace.h"

#include <map>
#include <stdexcept>
#include <string>

#include "device.h"

namespace tinyvllm::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("workspace: ") + what + ": " + cudaGetErrorString(error) +
                           " (call the op once before capturing a graph)");
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, current_device()), "cudaDeviceGetAttribute");
  return value;
}

struct ThreadWorkspaces {
  std::map<int, Workspace> of_device;

  ~ThreadWorkspaces() {
    // At the end of the process the driver may be gone already; then there is nothing to free.
    for (auto& [device, workspace] : of_device) cudaFree(workspace.scratch);
    cudaGetLastError();
  }
};

thread_local ThreadWorkspaces t_workspaces;

}  // namespace

const Workspace& workspace() {
  const int device = current_device();
  const auto found = t_workspaces.of_device.find(device);
  if (found != t_workspaces.of_device.end()) return found->second;
  Workspace made{};
  check(cudaMalloc(&made.scratch, Workspace::kBytes), "could not allocate 65 MiB");
  made.counters =
      reinterpret_cast<uint32_t*>(static_cast<char*>(made.scratch) + Workspace::kScratchBytes);
  // On a stream of its own, and no wait for the device: another thread may capture a graph now.
  const size_t num_bytes = Workspace::kBytes - Workspace::kScratchBytes;
  check(cudaMemsetAsync(made.counters, 0, num_bytes, cudaStreamPerThread), "cudaMemsetAsync");
  check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  return t_workspaces.of_device.emplace(device, made).first->second;
}

size_t release_workspace() {
  const auto found = t_workspaces.of_device.find(current_device());
  if (found == t_workspaces.of_device.end()) return 0;
  check(cudaFree(found->second.scratch), "cudaFree");  // waits for the kernels that use it
  t_workspaces.of_device.erase(found);
  return Workspace::kBytes;
}

int num_multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

int max_shared_bytes() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

int compute_capability_major() { return attribute(cudaDevAttrComputeCapabilityMajor); }

bool can_launch_early() { return compute_capability_major() >= 9; }

}  // namespace tinyvllm::cuda
