// The size of pages that layouts of shared memory count with.
#pragma once

#include <cstddef>

namespace accelmgr::ipc {

/// The largest page that Linux has on this processor. In shared memory, what is mapped or protected by itself
/// begins and ends at a multiple of it, so that every kernel may use the same layout.
#ifdef __x86_64__
constexpr std::size_t largest_page_bytes = 4096;
#else
constexpr std::size_t largest_page_bytes = std::size_t{64} << 10;  // Kernels of aarch64 have 4, 16 or 64 KiB.
#endif

/// `bytes`, rounded up to pages of that size.
constexpr std::size_t whole_pages(std::size_t bytes) noexcept {
  return (bytes + largest_page_bytes - 1) / largest_page_bytes * largest_page_bytes;
}

}  // namespace accelmgr::ipc
