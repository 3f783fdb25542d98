#include "engine/service/socket_path.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/timing.hpp"

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

/// The process that has locked this file; empty if the kernel does not tell. Lines of /proc/locks:
/// "1: FLOCK  ADVISORY  WRITE 4711 fe:00:10993779 0 EOF".
std::string holder_of(const struct stat& file) {
  const auto name = fmt::format("{:02x}:{:02x}:{}", major(file.st_dev), minor(file.st_dev), file.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, mode, pid, locked;
    words >> number >> kind >> advisory >> mode >> pid >> locked;
    if (kind == "FLOCK" && locked == name) return fmt::format(" by process {}", pid);
  }
  return {};
}

/// Locked while the path is looked at and replaced, so that two services that start at once do not remove
/// each other's socket.
base::UniqueFd locked_folder_of(const std::string& path, double patience_s) {
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
  const auto until = base::Deadline::in_seconds(patience_s);
  while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) refuse(path, fmt::format("its folder: {}", std::strerror(errno)));
    if (until.passed())
      refuse(path, fmt::format("its folder '{}' has been locked{} for {} s; end what holds the lock, or use "
                               "another folder",
                               folder.string(), holder_of(found), patience_s));
    std::this_thread::sleep_for(std::chrono::nanoseconds(timing::look_ns));
  }
  return fd;
}

void refuse_live(const std::string& path, const sockaddr_un& address) {
  const base::UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) throw SystemError("socket", errno);
  const bool connected =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  if (!connected && errno == ECONNREFUSED) return;
  ucred peer{};
  socklen_t size = sizeof peer;
  const bool known = connected && getsockopt(probe.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  // A process that a killed service has left behind may hold the socket. It accepts nothing.
  if (known && peer.pid > 0 && kill(peer.pid, 0) != 0 && errno == ESRCH) return;
  refuse(path, fmt::format("another service listens there{}; each service needs a path of its own",
                           known ? fmt::format(" (process {})", peer.pid) : ""));
}

void remove_stale(const std::string& path, const sockaddr_un& address) {
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0) return;
  if (!S_ISSOCK(found.st_mode)) refuse(path, "there is something that is not a socket");
  if (found.st_uid != geteuid()) refuse(path, "the socket there is of another user");
  refuse_live(path, address);
  if (unlink(path.c_str()) != 0) refuse(path, fmt::format("the old socket: {}", std::strerror(errno)));
}

}  // namespace

SocketPath::SocketPath(const std::string& path, std::optional<gid_t> group, double patience_s)
    : path_(std::filesystem::absolute(path).string()) {
  const auto address = address_of(path_);
  const auto folder = locked_folder_of(path_, patience_s);
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

}  // namespace accelmgr::service
