#include <stdexcept>
#include <string>

#include "device.h"

namespace tinyvllm::cuda {
namespace {

void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(what + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

}  // namespace

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // the error is answered: it must not surface at the next launch
  return 0;
}

DeviceGuard::DeviceGuard(int device_id) {
  const std::string device = "cuda:" + std::to_string(device_id);
  check(cudaGetDevice(&before_), device);
  if (before_ == device_id) return;
  check(cudaSetDevice(device_id), device);
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(before_);
}

void check_launch(const char* op) { check(cudaGetLastError(), op); }

}  // namespace tinyvllm::cuda
