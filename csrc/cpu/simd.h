// The few vector operations that the heavy kernels are written with, for each instruction set.
//
// Everything works on blocks of 16 fp32 values (F16), however many registers that takes, and on the
// packed lines of ops.h's `pack_linear`: 16 rows x 2 consecutive k in bf16, 64 bytes:
//
//   line:  w[0][k] w[0][k+1] | w[1][k] w[1][k+1] | ... | w[15][k] w[15][k+1]
//
// dot(acc, line, pair) adds w[i][k] * x[k] + w[i][k+1] * x[k+1] to acc[i], i = 0..15, which is one
// instruction (vdpbf16ps) where the processor has it, and two fp32 FMAs a register elsewhere: a
// bf16 is the upper half of an fp32, so `bits << 16` and `bits & 0xffff0000` are the two values.
//
// Rounding. FMAs are written out; nothing here may be contracted by the compiler (the build says
// -ffp-contract=off), because the same row must get the same bits from every tile shape.
// No `#pragma once`: the lower half is meant to be included once for every instruction set.
#ifndef TINYVLLM_ISA  // the plain pass: what does not depend on the instruction set
#ifndef TINYVLLM_CPU_SIMD_H
#define TINYVLLM_CPU_SIMD_H

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#define TINYVLLM_INLINE inline __attribute__((always_inline))

namespace tinyvllm::cpu {

constexpr int kLineRows = 16;   // output rows in a packed line
constexpr int kLineWords = 16;  // 32-bit words in it, each a pair of bf16

// A bf16 in memory. Sixteen bits of an fp32, never computed with directly.
using bf16_t = uint16_t;

inline float bf16_to_float(bf16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
inline bf16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16_t>((bits >> 16) | 0x40);
  return static_cast<bf16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Into the second-level cache.
TINYVLLM_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace tinyvllm::cpu

#endif  // TINYVLLM_CPU_SIMD_H
#else   // a pass of for_each_isa.h

namespace tinyvllm::cpu::TINYVLLM_ISA {

#if defined(TINYVLLM_ISA_AVX512)
constexpr int kWidth = 16;  // fp32 values in a register
#elif defined(TINYVLLM_ISA_AVX2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;

typedef float FloatV __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntV __attribute__((vector_size(kWidth * 4)));
typedef uint32_t WordV __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfV __attribute__((vector_size(kWidth * 2)));
typedef float FloatMem __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint32_t WordMem __attribute__((vector_size(kWidth * 4), aligned(2), may_alias));
typedef uint16_t HalfMem __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));

TINYVLLM_INLINE FloatV fma(FloatV a, FloatV b, FloatV c) {
#if defined(TINYVLLM_ISA_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(TINYVLLM_ISA_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// b where either is NaN.
TINYVLLM_INLINE FloatV max(FloatV a, FloatV b) {
#if defined(TINYVLLM_ISA_AVX512)
  // Not _mm512_max_ps: GCC 12 warns about the undefined operand inside it.
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(TINYVLLM_ISA_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// bf16 to words and back. GCC 12 would cut the generic conversions of 512 bits into halves.
TINYVLLM_INLINE WordV widen(HalfV half) {
#if defined(TINYVLLM_ISA_AVX512)
  return reinterpret_cast<WordV>(
      _mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(half)));
#else
  return __builtin_convertvector(half, WordV);
#endif
}
TINYVLLM_INLINE HalfV narrow(WordV words) {
#if defined(TINYVLLM_ISA_AVX512)
  return reinterpret_cast<HalfV>(
      _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(words)));
#else
  return __builtin_convertvector(words, HalfV);
#endif
}

struct F16 {
  FloatV v[kParts];
};

#define TINYVLLM_EACH_PART(i) _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

TINYVLLM_INLINE F16 set16(float x) {
  F16 r;
  TINYVLLM_EACH_PART(i) r.v[i] = FloatV{} + x;
  return r;
}
TINYVLLM_INLINE F16 zero16() { return set16(0.0f); }
TINYVLLM_INLINE F16 load16(const float* p) {
  F16 r;
  TINYVLLM_EACH_PART(i) r.v[i] = *reinterpret_cast<const FloatMem*>(p + i * kWidth);
  return r;
}
TINYVLLM_INLINE void store16(float* p, F16 a) {
  TINYVLLM_EACH_PART(i) { *reinterpret_cast<FloatMem*>(p + i * kWidth) = a.v[i]; }
}
TINYVLLM_INLINE F16 add(F16 a, F16 b) {
  TINYVLLM_EACH_PART(i) a.v[i] = a.v[i] + b.v[i];
  return a;
}
TINYVLLM_INLINE F16 sub(F16 a, F16 b) {
  TINYVLLM_EACH_PART(i) a.v[i] = a.v[i] - b.v[i];
  return a;
}
TINYVLLM_INLINE F16 mul(F16 a, F16 b) {
  TINYVLLM_EACH_PART(i) a.v[i] = a.v[i] * b.v[i];
  return a;
}
TINYVLLM_INLINE F16 fma(F16 a, F16 b, F16 c) {
  TINYVLLM_EACH_PART(i) a.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return a;
}
TINYVLLM_INLINE F16 max(F16 a, F16 b) {
  TINYVLLM_EACH_PART(i) a.v[i] = max(a.v[i], b.v[i]);
  return a;
}

// The first, or the last, 8 values of a, then the same of b.
TINYVLLM_INLINE F16 low_halves(F16 a, F16 b) {
#if defined(TINYVLLM_ISA_AVX512)
  return {{_mm512_shuffle_f32x4(a.v[0], b.v[0], 0x44)}};
#else
  TINYVLLM_EACH_PART(i) a.v[i] = i < kParts / 2 ? a.v[i] : b.v[i - kParts / 2];
  return a;
#endif
}
TINYVLLM_INLINE F16 high_halves(F16 a, F16 b) {
#if defined(TINYVLLM_ISA_AVX512)
  return {{_mm512_shuffle_f32x4(a.v[0], b.v[0], 0xee)}};
#else
  TINYVLLM_EACH_PART(i) {
    if (i < kParts / 2) b.v[i] = a.v[i + kParts / 2];
  }
  return b;
#endif
}

// Horizontal reductions, in one fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.
#if defined(TINYVLLM_ISA_AVX512)
#define TINYVLLM_REDUCE(x, op)                                                                    \
  x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#endif
TINYVLLM_INLINE FloatV sum_of(FloatV a, FloatV b) { return a + b; }
TINYVLLM_INLINE float reduce_add(F16 a) {
#if defined(TINYVLLM_ISA_AVX512)
  TINYVLLM_REDUCE(a.v[0], sum_of)
  return a.v[0][0];
#else
  alignas(64) float x[16];
  store16(x, a);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
  return x[0];
#endif
}
TINYVLLM_INLINE float reduce_max(F16 a) {
#if defined(TINYVLLM_ISA_AVX512)
  TINYVLLM_REDUCE(a.v[0], max)
  return a.v[0][0];
#else
  alignas(64) float x[16];
  store16(x, a);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  }
  return x[0];
#endif
}
#undef TINYVLLM_REDUCE

// Bit i: a[i] >= b[i].
TINYVLLM_INLINE uint32_t greater_equal_bits(F16 a, F16 b) {
#if defined(TINYVLLM_ISA_AVX512)
  return _mm512_cmp_ps_mask(a.v[0], b.v[0], _CMP_GE_OQ);
#else
  uint32_t bits = 0;
  TINYVLLM_EACH_PART(i) {
#if defined(TINYVLLM_ISA_AVX2)
    const uint32_t part = _mm256_movemask_ps(_mm256_cmp_ps(a.v[i], b.v[i], _CMP_GE_OQ));
#else
    const IntV mask = a.v[i] >= b.v[i];
    const uint32_t part = (mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8);
#endif
    bits |= part << (i * kWidth);
  }
  return bits;
#endif
}

// a where x >= bound, else (and where either is NaN) 0.
TINYVLLM_INLINE F16 keep_greater_equal(F16 a, F16 x, F16 bound) {
  TINYVLLM_EACH_PART(i) a.v[i] = x.v[i] >= bound.v[i] ? a.v[i] : FloatV{};
  return a;
}

// a where x > bound, b elsewhere.
TINYVLLM_INLINE F16 choose_greater(F16 a, F16 b, F16 x, F16 bound) {
  TINYVLLM_EACH_PART(i) a.v[i] = x.v[i] > bound.v[i] ? a.v[i] : b.v[i];
  return a;
}

TINYVLLM_INLINE F16 load16_bf16(const bf16_t* p) {
  F16 r;
  TINYVLLM_EACH_PART(i) {
    const HalfV half = *reinterpret_cast<const HalfMem*>(p + i * kWidth);
    r.v[i] = reinterpret_cast<FloatV>(widen(half) << 16);
  }
  return r;
}

// Rounds to nearest, ties to even; NaN stays NaN.
TINYVLLM_INLINE void store16_bf16(bf16_t* p, F16 a) {
  TINYVLLM_EACH_PART(i) {
    const WordV bits = reinterpret_cast<WordV>(a.v[i]);
    const WordV rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const WordV kept = a.v[i] == a.v[i] ? rounded : (bits | 0x00400000u);
    *reinterpret_cast<HalfMem*>(p + i * kWidth) = narrow(kept >> 16);
  }
}

// Sixteen fp64 values, for sums that must not depend on their order to any visible digit.
typedef double DoubleV __attribute__((vector_size(kWidth * 8)));
struct D16 {
  DoubleV v[kParts];
};
TINYVLLM_INLINE D16 zero16d() { return {}; }
TINYVLLM_INLINE D16 add(D16 a, F16 b) {
  TINYVLLM_EACH_PART(i) a.v[i] = a.v[i] + __builtin_convertvector(b.v[i], DoubleV);
  return a;
}
TINYVLLM_INLINE double reduce_add(D16 a) {
  double x[16];
  std::memcpy(x, &a, sizeof(x));
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
  return x[0];
}

// Stores a in bf16 (nearest, ties to even) and returns what was stored. For finite values that are
// normal or zero; NaN stays NaN.
TINYVLLM_INLINE F16 round_and_store16_bf16(bf16_t* p, F16 a) {
#if defined(TINYVLLM_ISA_AVX512_BF16)
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
  a.v[0] = reinterpret_cast<FloatV>(widen(reinterpret_cast<HalfV>(half)) << 16);
#else
  TINYVLLM_EACH_PART(i) {
    const WordV bits = reinterpret_cast<WordV>(a.v[i]);
    const WordV rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    a.v[i] = reinterpret_cast<FloatV>(rounded);
    *reinterpret_cast<HalfMem*>(p + i * kWidth) = narrow(rounded >> 16);
  }
#endif
  return a;
}

// words[i] = even[i] | odd[i] << 16: two rows of 16 bf16 become a packed line.
TINYVLLM_INLINE void interleave16(uint32_t* words, const bf16_t* even, const bf16_t* odd) {
  TINYVLLM_EACH_PART(i) {
    const HalfV low = *reinterpret_cast<const HalfMem*>(even + i * kWidth);
    const HalfV high = *reinterpret_cast<const HalfMem*>(odd + i * kWidth);
    *reinterpret_cast<WordMem*>(words + i * kWidth) = widen(low) | (widen(high) << 16);
  }
}

TINYVLLM_INLINE float first_lane(F16 a) { return a.v[0][0]; }

// Lanes [begin, end) of a, `other` elsewhere.
TINYVLLM_INLINE F16 keep_lanes(F16 a, int64_t begin, int64_t end, float other) {
  static constexpr int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t first = begin < 0 ? 0 : static_cast<int32_t>(begin < 16 ? begin : 16);
  const int32_t past = end < 0 ? 0 : static_cast<int32_t>(end < 16 ? end : 16);
  TINYVLLM_EACH_PART(i) {
    IntV lane;
    std::memcpy(&lane, kLane + i * kWidth, sizeof(lane));
    a.v[i] = (lane >= first) & (lane < past) ? a.v[i] : FloatV{} + other;
  }
  return a;
}

// 2^x for x <= 0, within 2e-7 relative; exactly 1 at 0 and exactly 0 below -126 (for -inf too);
// NaN for NaN. x is split into a whole n and f in [-1/2, 1/2]; 2^f is a polynomial of degree 5
// fitted to the smallest relative error (9e-8; the rest is rounding), 2^n goes into the exponent.
TINYVLLM_INLINE F16 exp2_nonpositive(F16 x) {
  F16 r;
  TINYVLLM_EACH_PART(i) {
#if defined(TINYVLLM_ISA_AVX512)
    const __mmask16 kept = _mm512_cmp_ps_mask(x.v[i], _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const FloatV n = _mm512_maskz_roundscale_ps(kept, x.v[i], _MM_FROUND_TO_NEAREST_INT);
    const FloatV f = x.v[i] - n;
#else
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number
    const FloatV t = x.v[i] < -126.0f ? FloatV{} - 126.0f : x.v[i];
    const FloatV shifted = t + kRound;
    const FloatV f = t - (shifted - kRound);
#endif
    FloatV p = FloatV{} + 0x1.5bba12p-10f;
    p = fma(p, f, FloatV{} + 0x1.3cea88p-7f);
    p = fma(p, f, FloatV{} + 0x1.c6b752p-5f);
    p = fma(p, f, FloatV{} + 0x1.ebf9bcp-3f);
    p = fma(p, f, FloatV{} + 0x1.62e42ap-1f);
    p = fma(p, f, FloatV{} + 1.0f);
#if defined(TINYVLLM_ISA_AVX512)
    r.v[i] = _mm512_maskz_scalef_ps(kept, p, n);
#else
    // The low bits of `shifted` are n, so this adds n to p's exponent field.
    const WordV scaled = reinterpret_cast<WordV>(p) + (reinterpret_cast<WordV>(shifted) << 23);
    const FloatV y = reinterpret_cast<FloatV>(scaled);
    const FloatV kept = x.v[i] < -126.0f ? FloatV{} : y;
    r.v[i] = x.v[i] == x.v[i] ? kept : x.v[i];
#endif
  }
  return r;
}

// ---- Packed lines -------------------------------------------------------------------------------

#if defined(TINYVLLM_ISA_AVX512_BF16)

struct Line {
  __m512i words;
};
struct Pair {
  __m512i words;
};
TINYVLLM_INLINE Line load_line(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
TINYVLLM_INLINE Pair set_pair(uint32_t two) {
  return {_mm512_set1_epi32(static_cast<int32_t>(two))};
}
TINYVLLM_INLINE F16 dot(F16 acc, Line line, Pair pair) {
  acc.v[0] = _mm512_dpbf16_ps(acc.v[0], reinterpret_cast<__m512bh>(line.words),
                              reinterpret_cast<__m512bh>(pair.words));
  return acc;
}

#else

struct Line {
  FloatV even[kParts], odd[kParts];
};
struct Pair {
  FloatV even, odd;
};
TINYVLLM_INLINE Line load_line(const uint32_t* p) {
  Line line;
  TINYVLLM_EACH_PART(i) {
    const WordV words = *reinterpret_cast<const WordMem*>(p + i * kWidth);
    line.even[i] = reinterpret_cast<FloatV>(words << 16);
    line.odd[i] = reinterpret_cast<FloatV>(words & 0xffff0000u);
  }
  return line;
}
TINYVLLM_INLINE Pair set_pair(uint32_t two) {
  const WordV words = WordV{} + two;
  return {reinterpret_cast<FloatV>(words << 16), reinterpret_cast<FloatV>(words & 0xffff0000u)};
}
TINYVLLM_INLINE F16 dot(F16 acc, Line line, Pair pair) {
  TINYVLLM_EACH_PART(i) {
    acc.v[i] = fma(line.even[i], pair.even, acc.v[i]);
    acc.v[i] = fma(line.odd[i], pair.odd, acc.v[i]);
  }
  return acc;
}

#endif

TINYVLLM_INLINE uint32_t load_pair(const bf16_t* p) {
  uint32_t two;
  std::memcpy(&two, p, sizeof(two));
  return two;
}

// acc[r][b][i] += sum over k < 2 * pairs of w[b][i][k] * x[r][k]: kRows rows of x against kBlocks
// packed blocks, one chain of additions for each output, k ascending. That order is the promise
// which makes a row's result independent of the tile it is computed in. `w` is the first block,
// the next one starts `block_words` later. ahead(step) is called before each of the `pairs` steps,
// to prefetch what comes next at the pace of the computation.
template <int kBlocks, int kRows, typename Ahead>
TINYVLLM_INLINE void dot_tile(F16 (&acc)[kRows][kBlocks], const uint32_t* w, int64_t block_words,
                              const bf16_t* x, int64_t row_stride, int64_t pairs, Ahead ahead) {
  for (int64_t k = 0; k < pairs; ++k) {
    ahead(k);
    Line lines[kBlocks];
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) lines[b] = load_line(w + b * block_words + k * kLineWords);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Pair pair = set_pair(load_pair(x + r * row_stride + 2 * k));
#pragma GCC unroll 8
      for (int b = 0; b < kBlocks; ++b) acc[r][b] = dot(acc[r][b], lines[b], pair);
    }
  }
}

#if defined(TINYVLLM_ISA_AVX512)
TINYVLLM_INLINE WordV unpack_low_words(WordV a, WordV b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
TINYVLLM_INLINE WordV unpack_high_words(WordV a, WordV b) {
  return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
typedef uint64_t PairV __attribute__((vector_size(64)));
TINYVLLM_INLINE WordV unpack_low_pairs(WordV a, WordV b) {
  return reinterpret_cast<WordV>(__builtin_shufflevector(
      reinterpret_cast<PairV>(a), reinterpret_cast<PairV>(b), 0, 8, 2, 10, 4, 12, 6, 14));
}
TINYVLLM_INLINE WordV unpack_high_pairs(WordV a, WordV b) {
  return reinterpret_cast<WordV>(__builtin_shufflevector(
      reinterpret_cast<PairV>(a), reinterpret_cast<PairV>(b), 1, 9, 3, 11, 5, 13, 7, 15));
}
TINYVLLM_INLINE WordV even_quarters(WordV a, WordV b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
TINYVLLM_INLINE WordV odd_quarters(WordV a, WordV b) {
  return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#endif

// Packs 16 rows of bf16 into `pairs` lines: word i of line k is x[2 * k], x[2 * k + 1] of row i.
TINYVLLM_INLINE void pack_lines(uint32_t* lines, const bf16_t* const* rows, int64_t pairs) {
  int64_t k = 0;
#if defined(TINYVLLM_ISA_AVX512)
  for (; k + 16 <= pairs; k += 16) {
    WordV r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      r[i] = *reinterpret_cast<const WordMem*>(rows[i] + 2 * k);
    }
    // A 16 x 16 transpose of words: pairs of rows, pairs of pairs, then 128-bit quarters twice.
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = unpack_low_words(r[i], r[i + 1]);
      t[i + 1] = unpack_high_words(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = unpack_low_pairs(t[i], t[i + 2]);
      r[i + 1] = unpack_high_pairs(t[i], t[i + 2]);
      r[i + 2] = unpack_low_pairs(t[i + 1], t[i + 3]);
      r[i + 3] = unpack_high_pairs(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = even_quarters(r[i], r[i + 4]);
      t[i + 4] = odd_quarters(r[i], r[i + 4]);
      t[i + 8] = even_quarters(r[i + 8], r[i + 12]);
      t[i + 12] = odd_quarters(r[i + 8], r[i + 12]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[i] = even_quarters(t[i], t[i + 8]);
      r[i + 4] = even_quarters(t[i + 4], t[i + 12]);
      r[i + 8] = odd_quarters(t[i], t[i + 8]);
      r[i + 12] = odd_quarters(t[i + 4], t[i + 12]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      *reinterpret_cast<WordMem*>(lines + (k + i) * kLineWords) = r[i];
    }
  }
#endif
  for (int i = 0; i < kLineRows; ++i) {
    for (int64_t j = k; j < pairs; ++j) {
      lines[j * kLineWords + i] = load_pair(rows[i] + 2 * j);
    }
  }
}

#undef TINYVLLM_EACH_PART

}  // namespace tinyvllm::cpu::TINYVLLM_ISA

#endif
