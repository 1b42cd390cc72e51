// A tensor as kernels see it: a pointer, a shape, strides in elements. No framework is known here.
#pragma once

#include <cstdint>

namespace tinyvllm {

enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32, kInt32, kInt64, kUInt8, kBool };
enum class DeviceType : uint8_t { kCpu, kCuda };

constexpr int kMaxDims = 5;

// A non-owning view, trivially copyable, so that a recorded graph can keep it by value. Whoever
// records a graph keeps the memory alive for as long as the graph may be replayed.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  DeviceType device = DeviceType::kCpu;
  int32_t device_id = 0;
  int32_t ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements

  template <typename T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
};

// [T, num_heads, head_dim] of rows [T, N] in which heads follow each other, from head `first` on.
inline Tensor heads_of(const Tensor& rows, int64_t first, int64_t num_heads, int64_t head_dim) {
  Tensor heads = rows;
  heads.data = rows.ptr<char>() + first * head_dim * 2;  // bf16
  heads.ndim = 3;
  heads.shape[1] = num_heads;
  heads.shape[2] = head_dim;
  heads.strides[1] = head_dim;
  heads.strides[2] = 1;
  return heads;
}

}  // namespace tinyvllm
