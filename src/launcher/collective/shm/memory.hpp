// The memory of a world: its descriptor, and the part of it that every rank keeps mapped.
#pragma once

#include <cstdint>

#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"
#include "launcher/collective/shm/layout.hpp"

namespace accelmgr::collective::shm {

/// Allocates the memory of [offset, offset + bytes) of a memfd; contents stay. Throws SessionError, which
/// says how much memory is available, when there is too little; otherwise SystemError.
void allocate_range(int memfd, std::uint64_t offset, std::uint64_t bytes);

/// Returns the memory of whole pages to the kernel. They read as zeros afterwards.
void discard_range(int memfd, std::uint64_t offset, std::uint64_t bytes) noexcept;

class Memory {
 public:
  /// Throws SessionError when `fd` is no world or a world of another build.
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

 private:
  template <class T>
  T* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(mapping_.data() + offset);
  }

  base::UniqueFd fd_;
  ipc::Mapping mapping_;  ///< Everything before the data of the slots.
};

}  // namespace accelmgr::collective::shm
