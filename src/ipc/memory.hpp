// Anonymous shared memory: memfds, their mappings, and how much memory there is for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

enum class Allocate { now, later };

/// A memfd of `bytes` bytes, all of them allocated unless that is to happen later, its size sealed for good.
/// `name` shows in /proc/PID/maps only. Throws SessionError when there is not so much memory, SystemError
/// otherwise. Ask memory_available() first: beyond its limits the kernel rather kills somebody than refuses.
base::UniqueFd create_memfd(const std::string& name, std::size_t bytes, Allocate when = Allocate::now);

/// Gives the first `bytes` of a memfd their memory; contents stay. Throws as create_memfd() does, with
/// `name`.
void allocate(int memfd, std::size_t bytes, const std::string& name);

enum class Access { read, read_write };

/// Owns a shared mapping. A forked child has a copy of the mapping at the same address, unless
/// keep_from_children() was called.
class Mapping {
 public:
  Mapping() = default;
  /// Maps [offset, offset + length) of `fd`, which may be closed afterwards; `offset` is a multiple of the
  /// page size. Throws SystemError.
  Mapping(int fd, std::size_t offset, std::size_t length, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

  /// What this process may do with the mapping from now on. Throws SystemError.
  void protect(Access access);

  /// Children that are forked from now on do not have the mapping: what they do at its addresses ends them.
  /// Throws SystemError.
  void keep_from_children() const;

 private:
  void unmap() noexcept;

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Makes the pages that hold [p, p + bytes) present and writable, so that no later access faults; contents
/// stay. `threads` share the work and have ended on return; 1 starts none. Throws SessionError when memory
/// runs out, SystemError otherwise.
void populate(std::byte* p, std::size_t bytes, int threads);

/// The same for reading, on the calling thread.
void populate_read(const std::byte* p, std::size_t bytes);

struct MemoryAvailable {
  std::uint64_t bytes;
  std::string limited_by;  ///< The file that says so: /proc/meminfo, or the limit of a control group.
};

/// How much this process can still allocate before the kernel kills somebody: the least of MemAvailable and
/// what the limits of its memory control groups (v1 and v2, ancestors included) leave. Shared memory counts
/// against all of them, whatever the size of /dev/shm. `root` is where proc and sys are mounted. Throws
/// SessionError when /proc/meminfo cannot be read.
MemoryAvailable memory_available(const std::filesystem::path& root = "/");

}  // namespace accelmgr::ipc
