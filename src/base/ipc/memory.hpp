// Anonymous shared memory: memfds, their mappings, and how much memory there is for them.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

enum class Allocate { now, later };

/// Creates a memfd of `bytes` bytes with a sealed size. Its memory is allocated now, or by allocate() later.
/// `name` shows only in /proc/PID/maps. Throws SessionError if there is not enough memory, SystemError for
/// other failures. Call memory_available() first: beyond its limits the kernel kills processes instead of
/// refusing.
base::UniqueFd create_memfd(const std::string& name, std::size_t bytes, Allocate when = Allocate::now);

/// Allocates `bytes` of a memfd from `offset` on; its contents stay. Throws as create_memfd() does; `name` is
/// for the text of the error.
void allocate(int memfd, std::size_t offset, std::size_t bytes, const std::string& name);

/// Opens a memfd of this process again, for reading alone: no process can map the result writable. A process
/// of the same user, or a privileged one, can still open the memfd for writing by way of /proc. Throws
/// SystemError.
base::UniqueFd open_read_only(int memfd);

/// The size of a memfd that is sealed against shrinking, as create_memfd() makes them: accesses within a
/// mapping of it cannot raise SIGBUS because another process shrank it. Throws SessionError for any other
/// descriptor; `what` says in the text what it should be ("the slab of rank 3").
std::size_t sealed_bytes(int fd, const std::string& what);

enum class Access { read, read_write };

/// Owns a shared mapping. A forked child has a copy of the mapping at the same address, unless
/// keep_from_children() was called.
class Mapping {
 public:
  Mapping() = default;
  /// Maps [offset, offset + length) of `fd`, which may be closed afterwards. `offset` must be a multiple of
  /// the page size. Throws SystemError.
  Mapping(int fd, std::size_t offset, std::size_t length, Access access);

  std::byte* data() const noexcept { return static_cast<std::byte*>(region_.get_address()); }
  std::size_t size() const noexcept { return region_.get_size(); }
  explicit operator bool() const noexcept { return data() != nullptr; }

  /// Children that are forked from now on do not have the mapping; one that uses its addresses dies. Throws
  /// SystemError.
  void keep_from_children() const;

  /// Gives up the shared memory: from now on the same addresses hold a private copy of its first `bytes`, and
  /// zeros behind them. If there is no memory for a copy, the addresses can only be read, and still show the
  /// shared memory. False if this process can still write there.
  bool make_private(std::size_t bytes) const noexcept;
  bool make_private() const noexcept { return make_private(size()); }
  /// Gives up the shared memory: the same addresses hold zeros, which can only be read. False if
  /// this process can still write to the memory.
  bool forget() const noexcept;

 private:
  boost::interprocess::mapped_region region_;
};

/// Makes the pages that hold [p, p + bytes) present and writable, so that no later access faults. Does not
/// change what they hold. Blocks. The caller and `threads` - 1 other threads share the work. Throws
/// SessionError if memory runs out, SystemError for other failures.
void populate(std::byte* p, std::size_t bytes, int threads);

/// Like populate(), but for reading, on the calling thread alone.
void populate_read(const std::byte* p, std::size_t bytes);

struct MemoryAvailable {
  std::uint64_t bytes;
  std::string limited_by;  ///< MemAvailable of /proc/meminfo, or the file with the limit of a control group.
};

/// How much this process can still allocate before the kernel kills processes: the minimum of MemAvailable
/// and of what the limits of its memory control groups leave (v1 and v2, ancestors included). Shared memory
/// counts against all of them, whatever the size of /dev/shm. `root` is where proc and sys are mounted.
/// Throws SessionError if /proc/meminfo cannot be read.
MemoryAvailable memory_available(const std::filesystem::path& root = "/");

struct OomKills {
  std::uint64_t count = 0;
  std::string counted_by;  ///< The file that says so. Empty: none does.
};
/// How many processes the kernel has killed for want of memory: in the memory control group of this process
/// (v1 and v2), or on this machine if the group does not say.
OomKills oom_kills(const std::filesystem::path& root = "/");

/// When memory runs out, the kernel kills this process rather than those of its host and manager, whose loss
/// costs more: they map the same memory, and look as large.
void be_killed_first() noexcept;

}  // namespace accelmgr::ipc
