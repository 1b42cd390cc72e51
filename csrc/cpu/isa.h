// Instruction sets: which one the process runs, and how a kernel is compiled for each.
//
// A kernel file that uses vectors has two halves, and is compiled once for every instruction set
// without any build flag (for_each_isa.h includes it again, inside a target pragma):
//
//   #ifdef TINYVLLM_ISA                                  portable, avx2, avx512 or avx512_bf16
//   #include "simd.h"                                    its vectors
//   namespace tinyvllm::cpu::TINYVLLM_ISA { void f_kernel(...) {...} }
//   #else
//   #define TINYVLLM_ISA_FILE "f.cpp"
//   #include "for_each_isa.h"                            declares and compiles the half above
//   namespace tinyvllm::cpu { void f(...) { TINYVLLM_DISPATCH(f_kernel)(...); } }
//   #endif
#pragma once

#include <cstdint>

namespace tinyvllm::cpu {

enum class Isa : uint8_t { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// The best that this processor and this build have, or the one that TINYVLLM_ISA names. Throws
// std::runtime_error when that name is unknown or the processor does not have it.
Isa isa();

// "portable", "avx2", "avx512", "avx512_bf16".
const char* isa_name(Isa isa);

// True when this processor can run it.
bool isa_available(Isa isa);

// Switches the whole process, for tests; not while an op runs. Throws like isa().
void set_isa(const char* name);

}  // namespace tinyvllm::cpu

#if defined(__x86_64__)
// A function of that name from every instruction set's namespace, the current one picked.
#define TINYVLLM_DISPATCH(function)                                                    \
  (::tinyvllm::cpu::isa() == ::tinyvllm::cpu::Isa::kAvx512Bf16 ? avx512_bf16::function \
   : ::tinyvllm::cpu::isa() == ::tinyvllm::cpu::Isa::kAvx512   ? avx512::function      \
   : ::tinyvllm::cpu::isa() == ::tinyvllm::cpu::Isa::kAvx2     ? avx2::function        \
                                                               : portable::function)
#else
#define TINYVLLM_DISPATCH(function) portable::function
#endif
