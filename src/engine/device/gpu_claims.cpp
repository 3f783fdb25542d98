#include "engine/device/gpu_claims.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <set>
#include <sstream>
#include <string_view>
#include <tuple>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/ipc/proc_file.hpp"

namespace accelmgr::device {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "accelmgr/gpu/";

/// False if the name is in use.
bool bind_name(int socket, const std::string& uuid) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto name = fmt::format("{}{}", prefix, uuid);
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);  // The byte 0 before it: no file.
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (bind(socket, reinterpret_cast<const sockaddr*>(&address), size) == 0) return true;
  if (errno == EADDRINUSE) return false;
  throw SystemError(fmt::format("claiming {}", uuid), errno);
}

/// The process that has the socket of that inode open, in words. Processes of other users do not show their
/// sockets.
std::string owner_of(const std::string& inode) {
  const auto wanted = fmt::format("socket:[{}]", inode);
  std::error_code ignored;  // A process may end meanwhile. The ++ of a range-for would throw then.
  const fs::directory_iterator end;
  for (fs::directory_iterator process("/proc", ignored); process != end; process.increment(ignored)) {
    const auto pid = process->path().filename().string();
    if (pid.find_first_not_of("0123456789") != std::string::npos) continue;
    for (fs::directory_iterator open(process->path() / "fd", ignored); open != end; open.increment(ignored))
      if (fs::read_symlink(open->path(), ignored) == wanted) return fmt::format("process {}", pid);
  }
  return "a process of another user";
}

}  // namespace

std::map<std::string, std::string> claimed_gpus() {
  std::map<std::string, std::string> claimed;
  std::istringstream sockets(ipc::read_proc("/proc/net/unix").value_or(""));
  for (std::string line; std::getline(sockets, line);) {
    // Num RefCount Protocol Flags Type St Inode Path
    std::istringstream fields(line);
    std::string skipped, inode, name;
    for (int i = 0; i < 6; ++i) fields >> skipped;
    fields >> inode >> name;
    if (const auto ours = fmt::format("@{}", prefix); name.starts_with(ours))
      claimed[name.substr(ours.size())] = owner_of(inode);
  }
  return claimed;
}

std::vector<int> GpuClaims::sockets() const {
  std::vector<int> numbers;
  for (const auto& socket : sockets_) numbers.push_back(socket.get());
  return numbers;
}

GpuClaims::GpuClaims(const Config& assigned) {
  const auto& [devices, oversubscribe] = std::tie(assigned.runners.devices, assigned.runners.oversubscribe);
  if (oversubscribe || assigned.runners.device != accelmgr::Device::cuda) return;
  for (const auto& uuid : std::set<std::string>(devices.begin(), devices.end())) {
    if (uuid == "cpu") continue;
    base::UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket) throw SystemError("socket", errno);
    // In order, up to the first failure: of several managers that start at once, one gets what it needs.
    if (!bind_name(socket.get(), uuid)) {
      missed_ = uuid;
      return;
    }
    sockets_.push_back(std::move(socket));
  }
}

}  // namespace accelmgr::device
