// A thread's working memory: grows to the largest size asked for and then is reused, so that in
// steady state an op allocates nothing. Freed when the thread ends.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace tinyvllm::cpu {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // `bytes` bytes, aligned to a cache line. What earlier calls returned is invalid from then on.
  void* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
      data_ = std::aligned_alloc(kAlign, rounded);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
    }
    return data_;
  }

  static constexpr size_t kAlign = 64;

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tinyvllm::cpu
