#include "engine/service/tcp_listener.hpp"

#include <fmt/format.h>

#include <boost/asio/ip/address.hpp>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/ipc/tcp.hpp"

namespace accelmgr::service {

TcpListener listen_at(const std::string& address) try {
  const auto wanted = ipc::parse_host_port(address.starts_with(':') ? "127.0.0.1" + address : address, 0);
  auto fd = ipc::bind_tcp(wanted.host, wanted.port);
  const auto bound = ipc::address_of(fd.get());
  return {.fd = std::move(fd),
          .address = text(bound),
          .others_reach_it = !boost::asio::ip::make_address(bound.host).is_loopback()};
} catch (const ConfigError& error) {
  throw ConfigError(fmt::format("--http '{}': {}", address, error.what()), "--http");
}

}  // namespace accelmgr::service
