// Searching one row of logits: what drawing and listing tokens share.
#pragma once

#include <cstdint>

namespace tinyvllm::cpu {

// The largest of x, NaN ignored; -inf when nothing is left.
float largest_logit(const float* x, int64_t n);

// The ids of the logits >= threshold, ascending, at most `limit` of them. Returns their number.
int64_t ids_from(int32_t* ids, const float* x, int64_t n, float threshold, int64_t limit);

// A logit that at least k logits reach, as high as one pass can tell; -inf when there are no k.
// `maxima` is working memory, [n + 32].
float lower_bound_of_kth(const float* x, int64_t n, int64_t k, float* maxima);

}  // namespace tinyvllm::cpu
