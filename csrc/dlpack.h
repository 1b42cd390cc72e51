// The part of the DLPack 1.x C ABI that the bindings use: how a framework lends a tensor, and the
// table of functions behind `__dlpack_c_exchange_api__`. Layouts and constants follow
// https://github.com/dmlc/dlpack (Apache License 2.0, Copyright (c) 2017 by Contributors);
// functions that we never call are declared as opaque pointers.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct DLPackVersion {
  uint32_t major;  // another major version means another layout
  uint32_t minor;
};

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };

struct DLDevice {
  DLDeviceType device_type;
  int32_t device_id;
};

enum DLDataTypeCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means contiguous
  uint64_t byte_offset;
};

struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;  // an older table, or null
};

struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // Fills `out` with a view that lives as long as `py_object`; -1 with a Python error set. Null
  // where the framework does not offer it.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  // The framework's current stream on that device; -1 with a Python error set.
  int (*current_work_stream)(DLDeviceType device_type, int32_t device_id, void** out_stream);
};

}  // extern "C"

constexpr uint32_t kDLPackMajorVersion = 1;
