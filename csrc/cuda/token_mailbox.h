// Drawn tokens on their way to the host, without a copy and without an event.
//
//     GPU:  ... draw ─► publish_tokens: stores (step, token) words into the host's memory
//     host: wait_for_tokens(step): looks at the words until all are of that step
//
// A word of 8 bytes holds a token and the number of the step that drew it, and is stored at once: a
// reader needs no fence to know which tokens are there. Steps use the rows of words in turn, so a
// row must have been read before the step that uses it next is launched. Numbers wrap around at
// 2^32, so the number of rows is a power of two.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"

namespace tinyvllm::cuda {

// Ends a step, whose number is num_steps + 1 from then on. words [num_rows, max_tokens] i64 is
// pinned memory of the host, num_steps [1] i32 and token_ids [R] i32 are on the device,
// R <= max_tokens. `after_copies`: who sees the words also sees what copies to the host stored
// before, which takes a fence.
void publish_tokens(const Tensor& words, const Tensor& num_steps, const Tensor& token_ids,
                    bool after_copies, Stream stream);

// The first `count` tokens of a step, once they are there. For a step without tokens: its end.
// Throws std::runtime_error when what was launched on `stream` has failed, or has ended without.
std::vector<int32_t> wait_for_tokens(const Tensor& words, uint32_t step, int64_t count,
                                     Stream stream);

}  // namespace tinyvllm::cuda
