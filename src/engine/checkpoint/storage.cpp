#include "engine/checkpoint/storage.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace accelmgr::checkpoint {
namespace {

namespace fs = std::filesystem;

// write(2) writes at most 2 GiB less a page.
constexpr std::size_t largest_write = std::size_t{1} << 30;

bool names_directory(const fs::path& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

fs::path parent_of(const fs::path& path) {
  const auto parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

void rename_folder(const fs::path& from, const fs::path& to) {
  if (rename(from.c_str(), to.c_str()) != 0)
    throw SystemError(fmt::format("renaming '{}' to '{}'", from.string(), to.string()), errno);
}

// For file systems that cannot exchange: the old folder is set aside, and moved back if the new one cannot
// take its place.
void replace_in_two_steps(const fs::path& from, const fs::path& to, const fs::path& aside) {
  if (!names_directory(to)) return rename_folder(from, to);
  rename_folder(to, aside);
  try {
    rename_folder(from, to);
  } catch (const SystemError&) {
    rename_folder(aside, to);
    throw;
  }
  rename_folder(aside, from);
}

}  // namespace

base::UniqueFd open_regular_file(int folder, const fs::path& name, const std::string& where) {
  base::UniqueFd fd(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw SystemError(fmt::format("opening '{}'", where), errno);
  struct stat status;
  if (fstat(fd.get(), &status) != 0) throw SystemError(fmt::format("fstat of '{}'", where), errno);
  if (!S_ISREG(status.st_mode)) throw CheckpointError(fmt::format("'{}' is not a regular file", where));
  return fd;
}

std::uint64_t file_bytes(int fd, const std::string& where) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw SystemError(fmt::format("fstat of '{}'", where), errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void make_directories(const fs::path& directory) {
  if (names_directory(directory)) return;
  int error = mkdir(directory.c_str(), 0777) == 0 ? 0 : errno;
  if (error == ENOENT && directory.has_relative_path()) {
    make_directories(parent_of(directory));
    error = mkdir(directory.c_str(), 0777) == 0 ? 0 : errno;
    if (error == EEXIST && names_directory(directory)) return;  // "a/b/" was created as its own parent "a/b".
  }
  if (error == EEXIST) error = ENOTDIR;  // Something other than a directory exists.
  if (error != 0) throw SystemError(fmt::format("making the directory '{}'", directory.string()), error);
  sync_directory(parent_of(directory));
}

void write_file(const fs::path& path, std::span<const std::byte> bytes) {
  base::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd) throw SystemError(fmt::format("making '{}'", path.string()), errno);
  for (auto rest = bytes; !rest.empty();) {
    const auto count = ::write(fd.get(), rest.data(), std::min(rest.size(), largest_write));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw SystemError(fmt::format("writing '{}', at byte {} of {}", path.string(),
                                    bytes.size() - rest.size(), bytes.size()),
                        errno);
    rest = rest.subspan(static_cast<std::size_t>(count));
  }
  if (fsync(fd.get()) != 0) throw SystemError(fmt::format("fsync of '{}'", path.string()), errno);
  if (close(fd.release()) != 0) throw SystemError(fmt::format("closing '{}'", path.string()), errno);
}

void sync_directory(const fs::path& directory) {
  const base::UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw SystemError(fmt::format("opening the directory '{}'", directory.string()), errno);
  // EINVAL: a file system whose directories need no fsync or do not support it.
  if (fsync(fd.get()) != 0 && errno != EINVAL)
    throw SystemError(fmt::format("fsync of the directory '{}'", directory.string()), errno);
}

void move_into_place(const fs::path& from, const fs::path& to, const fs::path& aside) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno == ENOENT) return rename_folder(from, to);
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return replace_in_two_steps(from, to, aside);
  throw SystemError(fmt::format("exchanging '{}' and '{}'", from.string(), to.string()), errno);
}

}  // namespace accelmgr::checkpoint
