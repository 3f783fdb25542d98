#include "launch/ports.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>

#include "accelmgr/errors.hpp"
#include "launch/host_port.hpp"
#include "launch/variables.hpp"

namespace accelmgr::launch {
namespace {

constexpr int backlog = 4096;  // The kernel takes less where net.core.somaxconn says so.
constexpr int on = 1, off = 0;

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

socklen_t fill(Address& address, int family, int port) {
  address = {};
  if (family == AF_INET6) {
    address.v6.sin6_family = AF_INET6;
    address.v6.sin6_addr = in6addr_any;
    address.v6.sin6_port = htons(static_cast<std::uint16_t>(port));
    return sizeof address.v6;
  }
  address.v4.sin_family = AF_INET;
  address.v4.sin_addr.s_addr = htonl(INADDR_ANY);
  address.v4.sin_port = htons(static_cast<std::uint16_t>(port));
  return sizeof address.v4;
}

int port_of(int socket) {
  Address address{};
  socklen_t bytes = sizeof address;
  if (::getsockname(socket, &address.any, &bytes) != 0) throw SystemError("getsockname", errno);
  return ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
}

// A socket that listens; none when the port is in use or not for us, or the host has no such family: `why`.
base::UniqueFd listen_at(int family, int port, int& why) {
  base::UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Address address;
  const auto bytes = fill(address, family, port);
  // Of a port that was served until just now, connections linger; they are no reason to refuse it.
  if (socket && ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
      (family == AF_INET || ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
      ::bind(socket.get(), &address.any, bytes) == 0 && ::listen(socket.get(), backlog) == 0)
    return socket;
  why = errno;
  return {};
}

std::optional<BoundPort> try_port(int port, int& why) {
  auto socket = listen_at(AF_INET6, port, why);
  if (!socket && (why == EAFNOSUPPORT || why == EADDRNOTAVAIL || why == EPROTONOSUPPORT))
    socket = listen_at(AF_INET, port, why);
  if (!socket) return std::nullopt;
  const int bound = port_of(socket.get());
  return BoundPort{std::move(socket), bound};
}

}  // namespace

BoundPort bind_port(int first) {
  int why = 0;
  if (first < 0 || first > highest_port)
    throw UsageError(fmt::format("bind_port({}): a port is from 0 to {}", first, highest_port));
  for (int port = first; port <= highest_port; ++port) {
    if (auto bound = try_port(port, why)) return std::move(*bound);
    if (first == 0 || (why != EADDRINUSE && why != EACCES)) break;
  }
  throw SystemError(
      first == 0 ? "binding any port" : fmt::format("binding a port from {} to {}", first, highest_port),
      why);
}

std::vector<std::pair<int, int>> WorkerPorts::descriptors(int local_index) const {
  std::vector<std::pair<int, int>> handed;
  if (!workers.empty())
    handed.emplace_back(workers.at(static_cast<std::size_t>(local_index)).socket.get(),
                        variable::worker_socket_number);
  if (service.socket && local_index == 0)
    handed.emplace_back(service.socket.get(), variable::service_socket_number);
  return handed;
}

WorkerPorts bind_worker_ports(Plan& plan, const Machine& machine) {
  WorkerPorts ports;
  if (plan.worker_form == WorkerForm::none || plan.nnodes > 1) return ports;
  if (plan.worker_form == WorkerForm::worker && plan.worker_hosts.empty()) {
    std::vector<int> numbers;
    for (int i = 0; i < plan.nprocs; ++i) {
      ports.workers.push_back(bind_port());
      numbers.push_back(ports.workers.back().port);
    }
    plan.workers = local_workers(machine.hostname, numbers);
    plan.workers_bound = true;
    plan.sources["workers"] = "ports bound here";
    plan.endpoints.clear();
    for (const auto& worker : plan.workers) plan.endpoints.push_back(text(worker.address));
    plan.sources["endpoints"] = "workers";
  }
  if (plan.nprocs > 1 && plan.service_address.empty()) {
    ports.service = bind_port();
    plan.service_address = text(HostPort{machine.hostname, ports.service.port});
    plan.service_bound = true;
    plan.sources["service_address"] = "port bound here";
  }
  return ports;
}

}  // namespace accelmgr::launch
