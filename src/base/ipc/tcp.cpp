#include "base/ipc/tcp.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/interruption.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/timing.hpp"

namespace accelmgr::ipc {
namespace {

/// torch connects to IPv4 addresses through IPv6 sockets, whose addresses begin so.
constexpr std::string_view ipv4_in_ipv6 = "::ffff:";

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Null if the name cannot be resolved; `why` is then the reason.
Addresses resolve(const std::string& host, int port, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) why = code == EAI_SYSTEM ? base::errno_text(errno) : gai_strerror(code);
  return {code == 0 ? found : nullptr, &freeaddrinfo};
}

HostPort in_numbers(const sockaddr* address) {
  auto host = host_of(address);
  if (host.starts_with(ipv4_in_ipv6)) host.erase(0, ipv4_in_ipv6.size());
  return {std::move(host), port_of(address)};
}

base::UniqueFd open_socket(const addrinfo& address, int flags = 0) {
  return base::UniqueFd(
      socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, address.ai_protocol));
}

int try_connect(int fd, const addrinfo& address, base::Deadline deadline) noexcept {
  if (connect(fd, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (wait_ready(fd, POLLOUT, deadline) == 0) return ETIMEDOUT;
  int code = 0;
  socklen_t length = sizeof code;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &length);
  return code;
}

void pause_until(base::Deadline deadline) noexcept { wait_ready(-1, 0, deadline); }

}  // namespace

base::UniqueFd try_bind_tcp(const std::string& host, int port, int& code) {
  std::string why;
  const auto addresses = resolve(host, port, why);
  if (!addresses) throw ConfigError(fmt::format("cannot listen at {}: {}", text({host, port}), why));
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    auto fd = open_socket(*address);
    code = fd ? bind_and_listen(fd.get(), address->ai_addr, address->ai_addrlen) : errno;
    if (code == 0) return fd;
  }
  return {};
}

base::UniqueFd bind_tcp(const std::string& host, int port) {
  const auto name = text({host, port});
  int code = 0;
  if (auto fd = try_bind_tcp(host, port, code)) return fd;
  if (code == EADDRINUSE)
    throw ConfigError(
        fmt::format("port {} is in use: cannot listen at {}; choose another port, or 0 for a "
                    "free one",
                    port, name));
  if (code == EADDRNOTAVAIL)
    throw ConfigError(fmt::format("cannot listen at {}: that is not an address of this node", name));
  if (base::is_shortage(code)) throw SystemError("listening at " + name, code);
  throw ConfigError(fmt::format("cannot listen at {}: {}", name, base::errno_text(code)));
}

HostPort address_of(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (getsockname(socket, address, &length) != 0) throw SystemError("getsockname", errno);
  return in_numbers(address);
}

HostPort peer_of(int fd) noexcept {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (getpeername(fd, address, &length) != 0) return {};
  if (storage.ss_family != AF_INET && storage.ss_family != AF_INET6) return {};
  return in_numbers(address);
}

HostPort reachable(const HostPort& address) {
  if (address.host == "0.0.0.0") return {"127.0.0.1", address.port};
  if (address.host == "::") return {"::1", address.port};
  return address;
}

HostPort wait_for_listener(const std::string& host, int port, base::Deadline deadline) {
  std::string why = "no time was left to try";
  const auto began_ns = base::now_ns();
  do {
    const auto addresses = resolve(host, port, why);
    for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
      const auto fd = open_socket(*address, SOCK_NONBLOCK);
      const auto until = earlier(deadline, base::Deadline::in_seconds(timing::connect_s));
      const int code = fd ? try_connect(fd.get(), *address, until) : errno;
      if (code == 0) return in_numbers(address->ai_addr);
      why = base::errno_text(code);
    }
    pause_until(earlier(deadline, base::Deadline::in_seconds(timing::connect_again_s)));
  } while (!deadline.passed() && !base::interrupted());
  throw SessionError(fmt::format("cannot reach {}: {}; tried for {:.3g} s", text({host, port}), why,
                                 double(base::now_ns() - began_ns) / 1e9));
}

}  // namespace accelmgr::ipc
