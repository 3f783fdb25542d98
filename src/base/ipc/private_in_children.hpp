// Shared memory that children of fork() have for themselves.
#pragma once

#include <cstdint>

#include "base/ipc/memory.hpp"

namespace accelmgr::ipc {

/// While this object lives, a child that this process forks has a private mapping at the addresses of a
/// shared one: what it writes there, no other process sees. It sees what others write to pages that it has
/// not written itself. If the child cannot map, it can only read there.
///
/// The memory is that of `fd`, from its beginning. The mapping and `fd` must outlive this object.
class PrivateInChildren {
 public:
  PrivateInChildren() = default;
  PrivateInChildren(const Mapping& mapping, int fd);
  ~PrivateInChildren() { reset(); }
  PrivateInChildren(PrivateInChildren&& other) noexcept;
  PrivateInChildren& operator=(PrivateInChildren&& other) noexcept;

  void reset() noexcept;

 private:
  std::uint64_t number_ = 0;  ///< 0: there is no mapping.
};

}  // namespace accelmgr::ipc
