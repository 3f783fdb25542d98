#include "engine/device/pinned_pages.hpp"

#include <algorithm>
#include <cstring>

namespace accelmgr::device {

void PinnedPages::grow(const Device& device, std::size_t bytes) {
  memory_.reset();
  bytes_ = 0;
  const auto wanted = std::max<std::size_t>(bytes, 1);
  memory_ = device.allocate_on_host(wanted);
  bytes_ = wanted;
  std::memset(memory_.get(), 0, bytes_);
}

}  // namespace accelmgr::device
