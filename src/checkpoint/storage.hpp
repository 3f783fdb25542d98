// Files and folders that outlast a power failure: what is written is synchronized before it gets its name.
// Everything here throws SystemError, which names the path, unless it says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::checkpoint {

/// `name` in the open directory `folder` (or AT_FDCWD), for reading. Throws CheckpointError for what is no
/// regular file: it is not opened for long enough to wait for the writer of a FIFO.
base::UniqueFd open_regular_file(int folder, const std::filesystem::path& name, const std::string& where);
std::uint64_t file_bytes(int fd, const std::string& where);

/// With its parents; nothing to do where it exists.
void make_directories(const std::filesystem::path& directory);
/// A new file, synchronized.
void write_file(const std::filesystem::path& path, std::span<const std::byte> bytes);
void sync_directory(const std::filesystem::path& directory);

/// Renames the folder `from` to `to`; a folder that is there already is at `from` afterwards. That is one
/// atomic exchange, but for file systems that know none: there `to` is at `aside` for a moment.
void move_into_place(const std::filesystem::path& from, const std::filesystem::path& to,
                     const std::filesystem::path& aside);

/// What `call` returns; a system call that failed in it becomes a CheckpointError of the same text.
template <typename Call>
auto as_checkpoint_error(Call&& call) {
  try {
    return call();
  } catch (const SystemError& error) {
    throw CheckpointError(error.what());
  }
}

}  // namespace accelmgr::checkpoint
