// The GPU as the host sees it: which there are, which one is current, and whether a launch worked.
#pragma once

namespace tinyvllm::cuda {

// Devices that can be used; 0 without a GPU or a driver. Never throws.
int num_devices();

// Makes `device_id` current for its lifetime. Throws std::runtime_error when it cannot be used.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Throws std::runtime_error, naming the op, if its launch was refused.
void check_launch(const char* op);

}  // namespace tinyvllm::cuda
