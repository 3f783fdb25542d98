#include "base/ipc/network.hpp"

#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <memory>

#include "accelmgr/errors.hpp"

namespace accelmgr::ipc {
namespace {

constexpr int backlog = 4096;  // The kernel reduces it to net.core.somaxconn.

const sockaddr_in& v4(const sockaddr* address) noexcept {
  return *reinterpret_cast<const sockaddr_in*>(address);
}
const sockaddr_in6& v6(const sockaddr* address) noexcept {
  return *reinterpret_cast<const sockaddr_in6*>(address);
}

}  // namespace

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string host_of(const sockaddr* address) {
  if (address->sa_family != AF_INET && address->sa_family != AF_INET6) return "";
  std::array<char, NI_MAXHOST> text{};
  const socklen_t length = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  const int error = getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

int port_of(const sockaddr* address) noexcept {
  if (address->sa_family == AF_INET) return ntohs(v4(address).sin_port);
  return address->sa_family == AF_INET6 ? ntohs(v6(address).sin6_port) : 0;
}

int bound_port(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (getsockname(socket, address, &length) != 0) throw SystemError("getsockname", errno);
  return port_of(address);
}

int bind_and_listen(int socket, const sockaddr* address, socklen_t length) noexcept {
  const int on = 1;
  const int off = 0;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address->sa_family == AF_INET6) setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  return bind(socket, address, length) == 0 && listen(socket, backlog) == 0 ? 0 : errno;
}

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw SystemError("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<InterfaceAddress> found;
  for (const int family : {AF_INET, AF_INET6})
    for (const auto* item = list; item != nullptr; item = item->ifa_next) {
      const auto* address = item->ifa_addr;
      if (address == nullptr || address->sa_family != family) continue;
      const auto host = host_of(address);
      found.push_back({.interface = item->ifa_name,
                       .host = host.substr(0, host.find('%')),
                       .up = (item->ifa_flags & IFF_UP) != 0,
                       .loopback = (item->ifa_flags & IFF_LOOPBACK) != 0,
                       .link_local = family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6(address).sin6_addr)});
    }
  return found;
}

}  // namespace accelmgr::ipc
