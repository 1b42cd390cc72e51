#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tinyvllm::cpu {
namespace {

constexpr int kUnset = -1;
std::atomic<int> g_isa{kUnset};

constexpr Isa kBestFirst[] = {Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kPortable};

Isa from_name(const std::string& name) {
  std::string known;
  for (const Isa isa : kBestFirst) {
    if (name == isa_name(isa)) {
      if (isa_available(isa)) return isa;
      throw std::runtime_error("TINYVLLM_ISA: this processor cannot run '" + name + "'");
    }
    known += std::string(known.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::runtime_error("TINYVLLM_ISA: expected one of " + known + ", got '" + name + "'");
}

Isa detect() {
  if (const char* name = std::getenv("TINYVLLM_ISA"); name != nullptr && *name != '\0') {
    return from_name(name);
  }
  for (const Isa isa : kBestFirst) {
    if (isa_available(isa)) return isa;
  }
  return Isa::kPortable;
}

}  // namespace

Isa isa() {
  int current = g_isa.load(std::memory_order_relaxed);
  if (current == kUnset) {
    current = static_cast<int>(detect());
    g_isa.store(current, std::memory_order_relaxed);
  }
  return static_cast<Isa>(current);
}

void set_isa(const char* name) { g_isa.store(static_cast<int>(from_name(name))); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

bool isa_available(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kPortable:
      return true;
  }
#endif
  return isa == Isa::kPortable;
}

}  // namespace tinyvllm::cpu
