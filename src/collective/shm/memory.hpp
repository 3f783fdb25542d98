// The memory of a world: its descriptor, and the part of it that all ranks always have mapped.
#pragma once

#include <cstdint>

#include "base/unique_fd.hpp"
#include "collective/shm/layout.hpp"
#include "ipc/memory.hpp"

namespace accelmgr::collective::shm {

/// Gives [offset, offset + bytes) of a memfd its memory; contents stay. Throws SessionError when there is too
/// little, and says how much there is; SystemError otherwise.
void allocate_range(int memfd, std::uint64_t offset, std::uint64_t bytes);

/// Returns the memory of whole pages: they are zeros afterwards.
void discard_range(int memfd, std::uint64_t offset, std::uint64_t bytes) noexcept;

class Memory {
 public:
  /// Throws SessionError when `fd` is no world, or one of another build.
  explicit Memory(int fd);

  int fd() const noexcept { return fd_.get(); }
  Header& header() const noexcept { return *at<Header>(0); }
  Rank& rank(int index) const noexcept { return at<Rank>(header().rank_lines)[index]; }
  Slot& slot(std::size_t index) const noexcept { return at<Slot>(header().slots)[index]; }
  std::uint64_t control_offset(std::size_t slot) const noexcept {
    return header().controls + slot * header().control_bytes;
  }
  std::uint64_t data_offset(std::size_t slot) const noexcept {
    return header().data + slot * header().data_bytes;
  }
  Control& control(std::size_t slot) const noexcept { return *at<Control>(control_offset(slot)); }
  Member* members(std::size_t slot) const noexcept {
    return at<Member>(control_offset(slot) + sizeof(Control));
  }
  /// The mask that member `member` may give with its verdict.
  std::uint64_t* missing(std::size_t slot, int member) const noexcept {
    const auto masks = control_offset(slot) + sizeof(Control) + header().ranks * sizeof(Member);
    return at<std::uint64_t>(masks) + static_cast<std::size_t>(member) * words_of_mask(header().ranks);
  }

 private:
  template <class T>
  T* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(mapping_.data() + offset);
  }

  base::UniqueFd fd_;
  ipc::Mapping mapping_;  ///< Up to the data of slots.
};

}  // namespace accelmgr::collective::shm
