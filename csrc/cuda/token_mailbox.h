// Drawn tokens on their way to the host, without a copy and without an event.
//
//     GPU:  ... draw ─► publish: stores (step, token) words into the host's memory
//     host: wait(step): looks at the words until all are of that step
//
// A word of 8 bytes holds a token and the number of the step that drew it, and is stored at once: a
// reader needs no fence to know which tokens are there. Steps use `num_stages` rows of words in
// turn, so a row must have been read before the step `num_stages` later is launched.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"

namespace tinyvllm::cuda {

class TokenMailbox {
 public:
  // On the current device. Throws std::runtime_error when there is no memory.
  TokenMailbox(int64_t max_rows, int num_stages);
  ~TokenMailbox();
  TokenMailbox(const TokenMailbox&) = delete;
  TokenMailbox& operator=(const TokenMailbox&) = delete;

  int64_t max_rows() const { return max_rows_; }

  // Ends a step: token_ids [R] i32, R <= max_rows. Launched or captured; runs are counted from 1.
  void publish(const Tensor& token_ids, Stream stream);

  // The first `count` tokens of a step, once they are there. For a step without tokens: its end.
  // Throws std::runtime_error when what was launched on `stream` has failed, or has ended without.
  std::vector<int32_t> wait(uint32_t step, int64_t count, Stream stream) const;

 private:
  int64_t max_rows_;
  int num_stages_;
  uint64_t* words_ = nullptr;      // [num_stages, max_rows], pinned memory of the host
  uint32_t* num_steps_ = nullptr;  // on the device
};

}  // namespace tinyvllm::cuda
