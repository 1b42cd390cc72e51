// Includes TINYVLLM_ISA_FILE once for every instruction set, with TINYVLLM_ISA naming it (see
// isa.h). No include guard: each kernel file includes this once.
//
// Everything that the kernel half needs from outside must be included before, in the plain pass:
// a header first seen inside a target pragma would be compiled for that target for everybody.

#if !defined(__x86_64__)

#define TINYVLLM_ISA portable
#include TINYVLLM_ISA_FILE
#undef TINYVLLM_ISA

#else

#define TINYVLLM_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TINYVLLM_BEGIN_TARGET(features) \
  TINYVLLM_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TINYVLLM_END_TARGET _Pragma("clang attribute pop")
#else
#define TINYVLLM_BEGIN_TARGET(features) \
  _Pragma("GCC push_options") TINYVLLM_PRAGMA(GCC target(features))
#define TINYVLLM_END_TARGET _Pragma("GCC pop_options")
#endif

#define TINYVLLM_ISA portable
#include TINYVLLM_ISA_FILE
#undef TINYVLLM_ISA

#define TINYVLLM_ISA avx2
#define TINYVLLM_ISA_AVX2 1
TINYVLLM_BEGIN_TARGET("avx2,fma,bmi,bmi2,lzcnt,popcnt")
#include TINYVLLM_ISA_FILE
TINYVLLM_END_TARGET
#undef TINYVLLM_ISA_AVX2
#undef TINYVLLM_ISA

#define TINYVLLM_ISA avx512
#define TINYVLLM_ISA_AVX512 1
TINYVLLM_BEGIN_TARGET("avx2,fma,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512dq")
#include TINYVLLM_ISA_FILE
TINYVLLM_END_TARGET
#undef TINYVLLM_ISA

#define TINYVLLM_ISA avx512_bf16
#define TINYVLLM_ISA_AVX512_BF16 1
TINYVLLM_BEGIN_TARGET(
    "avx2,fma,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#include TINYVLLM_ISA_FILE
TINYVLLM_END_TARGET
#undef TINYVLLM_ISA_AVX512_BF16
#undef TINYVLLM_ISA_AVX512
#undef TINYVLLM_ISA

#undef TINYVLLM_BEGIN_TARGET
#undef TINYVLLM_END_TARGET
#undef TINYVLLM_PRAGMA

#endif
#undef TINYVLLM_ISA_FILE
