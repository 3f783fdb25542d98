// One run at a time writes to a directory of checkpoints. It holds the lock of the file `.lock` in it, which
// says who that is:
//
//   {"host": "vm", "pid": 4711, "run": "5f0c6a1e9b24d378"}
//
// The kernel unlocks it when the process ends. The file goes when the lock is given back, so that one which
// nobody holds was left by a run that was killed.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>

#include "base/unique_fd.hpp"

namespace accelmgr::checkpoint {

/// Used by one thread.
class DirectoryLock {
 public:
  /// Makes `directory` if need be, and writes to it. Blocks for up to 10 s where the process that locked it
  /// has ended and one that writes for it has not. Throws CheckpointError: the directory cannot be written
  /// (with the reason), or another run uses it (with its process).
  explicit DirectoryLock(const std::filesystem::path& directory);
  /// In a forked child the lock stays its parent's.
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  /// The id of the run that was killed while it held the lock; empty: there was none.
  const std::string& killed_run() const noexcept { return killed_run_; }
  /// The id of the run that holds it. Throws CheckpointError.
  void set_run(const std::string& id);

  /// A process that has a duplicate keeps the directory locked after this one has ended.
  int fd() const noexcept { return fd_.get(); }

 private:
  bool try_to_lock();
  void write(const std::string& run) const;

  std::filesystem::path path_;
  base::UniqueFd fd_;
  pid_t owner_;
  std::string killed_run_;
};

}  // namespace accelmgr::checkpoint
