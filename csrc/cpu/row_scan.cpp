// Searching one row of logits, 16 a step; row_scan.h says what for.
#ifdef TINYVLLM_ISA
#include "simd.h"
#include "simd_tail.h"

namespace tinyvllm::cpu::TINYVLLM_ISA {

float largest_logit(const float* x, int64_t n) {
  F16 m[4];
  for (F16& lane : m) lane = set16(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + 4 * kLineRows <= n; i += 4 * kLineRows) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) m[j] = max(load16(x + i + j * kLineRows), m[j]);
  }
  for (; i < n; i += kLineRows) m[0] = max(load_logits(x, i, n), m[0]);
  return reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
}

int64_t ids_from(int32_t* ids, const float* x, int64_t n, float threshold, int64_t limit) {
  const F16 bound = set16(threshold);
  int64_t count = 0;
  for (int64_t i = 0; i < n && count < limit; i += kLineRows) {
    uint32_t bits = greater_equal_bits(load_logits(x, i, n), bound);
    if (i + kLineRows > n) bits &= (1u << (n - i)) - 1;
    for (; bits != 0 && count < limit; bits &= bits - 1) {
      ids[count++] = static_cast<int32_t>(i + __builtin_ctz(bits));
    }
  }
  return count;
}

// The maxima of groups of `length` logits that lie 16 apart. maxima [16 * ceil(n / 16 / length)].
void group_maxima(float* maxima, const float* x, int64_t n, int64_t length) {
  for (int64_t i = 0; i < n; maxima += kLineRows) {
    F16 m = set16(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < length && i < n; ++j, i += kLineRows) m = max(load_logits(x, i, n), m);
    store16(maxima, m);
  }
}

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#else

#include "row_scan.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "isa.h"
#include "simd.h"
#include "simd_tail.h"

#define TINYVLLM_ISA_FILE "row_scan.cpp"
#include "for_each_isa.h"

namespace tinyvllm::cpu {

float largest_logit(const float* x, int64_t n) { return TINYVLLM_DISPATCH(largest_logit)(x, n); }

int64_t ids_from(int32_t* ids, const float* x, int64_t n, float threshold, int64_t limit) {
  return TINYVLLM_DISPATCH(ids_from)(ids, x, n, threshold, limit);
}

// The k-th largest of the maxima of more than k groups.
float lower_bound_of_kth(const float* x, int64_t n, int64_t k, float* maxima) {
  const int64_t blocks = (n + kLineRows - 1) / kLineRows;
  const int64_t length = std::max<int64_t>(1, blocks / ((4 * k + kLineRows - 1) / kLineRows));
  const int64_t groups = (blocks + length - 1) / length * kLineRows;
  if (groups < k) return -std::numeric_limits<float>::infinity();
  TINYVLLM_DISPATCH(group_maxima)(maxima, x, n, length);
  std::nth_element(maxima, maxima + (k - 1), maxima + groups, std::greater<float>());
  return maxima[k - 1];
}

}  // namespace tinyvllm::cpu

#endif
