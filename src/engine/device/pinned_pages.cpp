#include "engine/device/pinned_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "engine/session/layout.hpp"

namespace accelmgr::device {

void PinnedPages::Unmap::operator()(std::byte* pages) const noexcept { munmap(pages, bytes); }

void PinnedPages::grow(const Device& device, std::size_t bytes) {
  give_back();
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const auto wanted = session::align_up(std::max<std::uint64_t>(bytes, 1), page);
  void* mapped = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  pages_ = {static_cast<std::byte*>(mapped), {wanted}};
  device_ = &device;
  registration_ = device.register_pages(span(), register_read_write);
}

void PinnedPages::give_back() noexcept {
  registration_.reset();
  if (device_ != nullptr && device_->given_up()) static_cast<void>(pages_.release());
  pages_.reset();
}

}  // namespace accelmgr::device
