#include "service/socket_path.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "accelmgr/errors.hpp"

namespace accelmgr::service {
namespace {

constexpr const char* key = "--socket";

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw ConfigError(fmt::format("{} '{}': {}", key, path, why), key);
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path)
    refuse(path, fmt::format("the path of a socket must have 1 to {} characters, and this one has {}",
                             sizeof address.sun_path - 1, path.size()));
  path.copy(address.sun_path, path.size());
  return address;
}

/// Locked while the path is looked at and replaced, so that two services that start at once do not remove
/// each other's socket.
base::UniqueFd locked_folder_of(const std::string& path) {
  auto folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  base::UniqueFd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) refuse(path, fmt::format("its folder cannot be opened: {}", std::strerror(errno)));
  struct stat found {};
  fstat(fd.get(), &found);
  const bool others_may_write = (found.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (found.st_mode & S_ISVTX) == 0;
  const bool is_of_another = found.st_uid != geteuid() && found.st_uid != 0;
  if (others_may_write || is_of_another)
    refuse(path, "other users may replace files in its folder; use one that only this user may write to");
  if (flock(fd.get(), LOCK_EX) != 0) refuse(path, fmt::format("its folder: {}", std::strerror(errno)));
  return fd;
}

bool answers(const sockaddr_un& address) {
  const base::UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) throw SystemError("socket", errno);
  const bool connected =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  return connected || errno != ECONNREFUSED;
}

void remove_stale(const std::string& path, const sockaddr_un& address) {
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0) return;
  if (!S_ISSOCK(found.st_mode)) refuse(path, "there is something that is not a socket");
  if (found.st_uid != geteuid()) refuse(path, "the socket there is of another user");
  if (answers(address)) refuse(path, "another service listens there");
  if (unlink(path.c_str()) != 0) refuse(path, fmt::format("the old socket: {}", std::strerror(errno)));
}

}  // namespace

SocketPath::SocketPath(const std::string& path, std::optional<gid_t> group)
    : path_(std::filesystem::absolute(path).string()) {
  const auto address = address_of(path_);
  const auto folder = locked_folder_of(path_);
  remove_stale(path_, address);
  fd_ = base::UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd_) throw SystemError("socket", errno);
  // Before bind(), which gives the file this mode: it is never open to others.
  const mode_t mode = group ? S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP : S_IRUSR | S_IWUSR;
  if (fchmod(fd_.get(), mode) != 0) throw SystemError("fchmod of a socket", errno);
  if (bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    refuse(path_, std::strerror(errno));
  struct stat made {};
  if (lstat(path_.c_str(), &made) != 0) refuse(path_, std::strerror(errno));
  device_ = made.st_dev;
  inode_ = made.st_ino;
  // The umask may have taken the group's bits.
  if (group &&
      (lchown(path_.c_str(), static_cast<uid_t>(-1), *group) != 0 || chmod(path_.c_str(), mode) != 0))
    refuse(path_, fmt::format("the group: {}", std::strerror(errno)));
  constexpr int backlog = 128;
  if (listen(fd_.get(), backlog) != 0) throw SystemError("listen", errno);
}

SocketPath::~SocketPath() { remove(); }

void SocketPath::remove() noexcept {
  if (removed_ || inode_ == 0) return;
  removed_ = true;
  struct stat found {};
  if (lstat(path_.c_str(), &found) == 0 && found.st_dev == device_ && found.st_ino == inode_)
    unlink(path_.c_str());
}

std::string default_socket_path() {
  const char* folder = std::getenv("XDG_RUNTIME_DIR");
  return folder == nullptr || *folder == '\0' ? std::string() : std::string(folder) + "/accelmgr.sock";
}

}  // namespace accelmgr::service
