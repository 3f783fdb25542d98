// Files and folders that survive a power failure: contents are synchronized before they get their name.
// Functions here throw SystemError, which names the path, unless stated otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::checkpoint {

/// Opens `name` in the open directory `folder` (or AT_FDCWD) for reading. Throws CheckpointError for anything
/// but a regular file. Never blocks on a FIFO without a writer.
base::UniqueFd open_regular_file(int folder, const std::filesystem::path& name, const std::string& where);
std::uint64_t file_bytes(int fd, const std::string& where);

/// Creates a directory and its parents. Does nothing where it exists.
void make_directories(const std::filesystem::path& directory);
/// Creates a new file and synchronizes it. Throws when `path` exists.
void write_file(const std::filesystem::path& path, std::span<const std::byte> bytes);
void sync_directory(const std::filesystem::path& directory);

/// Renames the folder `from` to `to`. If `to` exists, the old folder is at `from` afterwards. That is one
/// atomic exchange where the file system supports it; elsewhere the old folder is at `aside` for a moment.
void move_into_place(const std::filesystem::path& from, const std::filesystem::path& to,
                     const std::filesystem::path& aside);

/// Returns call(). A SystemError that it throws becomes a CheckpointError with the same text.
template <typename Call>
auto as_checkpoint_error(Call&& call) {
  try {
    return call();
  } catch (const SystemError& error) {
    throw CheckpointError(error.what());
  }
}

}  // namespace accelmgr::checkpoint
