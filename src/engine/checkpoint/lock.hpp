// One run at a time may write to a directory of checkpoints. It holds a lock on the file `.lock` there, which
// names the holder:
//
//   {"host": "vm", "pid": 4711, "run": "5f0c6a1e9b24d378"}
//
// The kernel releases the lock when the process ends. The file is removed when the lock is given back. So a
// file that no process has locked was left by a run that was killed.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::checkpoint {

/// True if no process of this machine has that pid. A process does not count if it has ended but its parent
/// has not waited for it, or if it began at another time than `began` (ipc::began_at()). False if that cannot
/// be found out.
bool has_ended(pid_t pid, std::optional<std::uint64_t> began = {});

/// Not thread-safe.
class DirectoryLock : base::Unmovable {
 public:
  /// Creates `directory` if need be, locks it and writes the file. Blocks for up to 10 s when the locking
  /// process has ended but a process with a duplicate of the descriptor has not. Throws CheckpointError when
  /// the directory cannot be written (with the reason), or another run uses it (with its process).
  explicit DirectoryLock(const std::filesystem::path& directory);
  /// Gives the lock back. Does nothing in a forked child: the lock stays the parent's.
  ~DirectoryLock();

  /// The id of the run that was killed while it held the lock; empty if there was none.
  const std::string& killed_run() const noexcept { return killed_run_; }
  /// Writes the id of this run, which holds the lock, to the file. Throws CheckpointError.
  void set_run(const std::string& id);

  /// False if the file was removed, with its directory for instance: another run may lock a new one.
  bool is_held() const noexcept;

  /// The locked descriptor. A process with a duplicate keeps the directory locked after this one has ended.
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
