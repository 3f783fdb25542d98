#include "service/tcp_listener.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <boost/asio/ip/address.hpp>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "accelmgr/errors.hpp"
#include "ipc/network.hpp"

namespace accelmgr::service {
namespace {

[[noreturn]] void refuse_address(const std::string& address, const std::string& why) {
  throw ConfigError(fmt::format("--http '{}': {}", address, why), "--http");
}

struct HostAndPort {
  std::string host, port;
};

HostAndPort parts_of(const std::string& address) {
  const auto colon = address.rfind(':');
  if (colon == std::string::npos) refuse_address(address, "it must be HOST:PORT");
  HostAndPort parts{address.substr(0, colon), address.substr(colon + 1)};
  std::uint16_t number = 0;
  const auto* end = parts.port.data() + parts.port.size();
  const auto [stop, error] = std::from_chars(parts.port.data(), end, number);
  if (error != std::errc{} || stop != end)
    refuse_address(address, "the port must be a number from 0 to 65535");
  if (parts.host.empty()) parts.host = "127.0.0.1";
  const bool in_brackets = parts.host.size() > 2 && parts.host.front() == '[' && parts.host.back() == ']';
  if (in_brackets) parts.host = parts.host.substr(1, parts.host.size() - 2);
  if (!in_brackets && parts.host.find(':') != std::string::npos)
    refuse_address(address, "an address of IPv6 is in brackets: [::1]:PORT");
  return parts;
}

}  // namespace

TcpListener listen_at(const std::string& address) {
  const auto [host, port] = parts_of(address);
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0)
    refuse_address(address, gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  base::UniqueFd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) refuse_address(address, std::strerror(errno));
  if (const int error = ipc::bind_and_listen(fd.get(), found->ai_addr, found->ai_addrlen); error != 0)
    refuse_address(address, std::strerror(error));
  const auto number = ipc::host_of(found->ai_addr);
  const bool is_v6 = found->ai_family == AF_INET6;
  const auto bound =
      fmt::format(fmt::runtime(is_v6 ? "[{}]:{}" : "{}:{}"), number, ipc::bound_port(fd.get()));
  return {.fd = std::move(fd),
          .address = bound,
          .others_reach_it = !boost::asio::ip::make_address(number).is_loopback()};
}

}  // namespace accelmgr::service
