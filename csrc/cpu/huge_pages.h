// Memory that is streamed through once a step: 2 MiB pages save a page walk every 64 lines, and
// keep the host's own pages in the TLB meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tinyvllm::cpu {

// Asks for huge pages for what is not yet written of [data, data + bytes). A hint: never fails.
inline void advise_huge_pages(void* data, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace tinyvllm::cpu
