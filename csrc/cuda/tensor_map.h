// Tensor maps: what tells the copy engine of sm_90 and later how a tensor lies in memory
// (cp.async.bulk.tensor). Made on the host, passed to kernels by value as __grid_constant__.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tinyvllm::cuda {

// cuTensorMapEncodeTiled, from the driver that is there: nothing is linked to it.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw std::runtime_error(
          "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or newer");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return encoder;
}

// shape, strides (in bytes, of all dimensions but the first) and box begin with the innermost
// dimension. What a box holds beyond the tensor arrives as zeros.
template <int kDims>
void encode_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                       const cuuint64_t (&shape)[kDims], const cuuint64_t (&strides)[kDims - 1],
                       const cuuint32_t (&box)[kDims], CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  cuuint32_t element_strides[kDims];
  std::fill_n(element_strides, kDims, 1);
  const CUresult result = tensor_map_encoder()(
      &map, type, kDims, const_cast<void*>(data), shape, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(result));
  }
}

}  // namespace tinyvllm::cuda
