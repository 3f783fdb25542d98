// Which GPUs of this machine have a session. A manager claims those of its runners, so that another one does
// not compute there too. A claim is a socket with the GPU's UUID as its name in the kernel's abstract
// namespace: it ends with its process, however that ends, and leaves no file. Containers with networks of
// their own do not see each other's claims.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::device {

/// By the UUID of each GPU that is claimed: by whom, in words ("process 4711").
std::map<std::string, std::string> claimed_gpus();

/// A forked child that does not close sockets() keeps the claims.
class GpuClaims {
 public:
  GpuClaims() = default;
  /// Claims the GPUs of an assigned configuration, unless runners may share them (`runners.oversubscribe`).
  /// Throws SystemError.
  explicit GpuClaims(const Config& assigned);

  /// The UUID of a GPU that another process has claimed; the GPUs after it are not claimed then. Empty: all
  /// are claimed.
  const std::string& missed() const noexcept { return missed_; }
  std::vector<int> sockets() const;

 private:
  std::vector<base::UniqueFd> sockets_;
  std::string missed_;
};

}  // namespace accelmgr::device
