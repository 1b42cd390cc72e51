// Index tensors come from the host's bookkeeping; a wrong one must not become a wild read. Scanning
// them costs a few nanoseconds a token, so it is done in every call, graph replays included.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "tensor.h"

namespace tinyvllm::cpu {

// Throws std::out_of_range (IndexError in Python) unless low <= indices[i] < high for all i.
inline void check_indices(const char* op, const char* arg, const Tensor& indices, int64_t low,
                          int64_t high) {
  const int32_t* values = indices.ptr<int32_t>();
  for (int64_t i = 0; i < indices.shape[0]; ++i) {
    if (values[i] >= low && values[i] < high) continue;
    throw std::out_of_range(std::string(op) + ": " + arg + "[" + std::to_string(i) +
                            "]: expected " + std::to_string(low) + " <= index < " +
                            std::to_string(high) + ", got " + std::to_string(values[i]));
  }
}

}  // namespace tinyvllm::cpu
