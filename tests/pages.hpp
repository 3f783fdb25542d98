// Memory of whole pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/ipc/pages.hpp"

namespace accelmgr::test {

/// Zeros; at least one page.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_((std::max<std::size_t>(bytes, 1) + page - 1) / page * page),
        data_(static_cast<std::byte*>(std::aligned_alloc(page, bytes_))) {
    std::fill_n(data_.get(), bytes_, std::byte{0});
  }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  static constexpr std::size_t page = ipc::largest_page_bytes;
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace accelmgr::test
