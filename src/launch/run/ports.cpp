#include "launch/run/ports.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>

#include "accelmgr/errors.hpp"
#include "ipc/host_port.hpp"
#include "ipc/network.hpp"
#include "launch/compat/variables.hpp"

namespace accelmgr::launch {
namespace {

// A listening socket. Empty if that failed; `why` is then the errno value.
template <class Address>
base::UniqueFd listen_at(const Address& address, int family, int& why) {
  base::UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  why = socket
            ? ipc::bind_and_listen(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address)
            : errno;
  return why == 0 ? std::move(socket) : base::UniqueFd();
}

std::optional<BoundPort> try_port(int port, int& why) {
  // What is not set is 0, and the address of zeros stands for all addresses.
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(static_cast<std::uint16_t>(port));
  auto socket = listen_at(v6, AF_INET6, why);
  if (!socket && (why == EAFNOSUPPORT || why == EADDRNOTAVAIL || why == EPROTONOSUPPORT)) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = v6.sin6_port;
    socket = listen_at(v4, AF_INET, why);
  }
  if (!socket) return std::nullopt;
  const int bound = ipc::bound_port(socket.get());
  return BoundPort{std::move(socket), bound};
}

}  // namespace

BoundPort bind_port(int first) {
  int why = 0;
  if (first < 0 || first > ipc::highest_port)
    throw UsageError(fmt::format("bind_port({}): a port is from 0 to {}", first, ipc::highest_port));
  for (int port = first; port <= ipc::highest_port; ++port) {
    if (auto bound = try_port(port, why)) return std::move(*bound);
    if (first == 0 || (why != EADDRINUSE && why != EACCES)) break;
  }
  throw SystemError(
      first == 0 ? "binding any port" : fmt::format("binding a port from {} to {}", first, ipc::highest_port),
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

WorkerPorts bind_worker_ports(LaunchSpec& spec, const HostInfo& host_info) {
  WorkerPorts ports;
  if (spec.worker_form == WorkerForm::none || spec.nnodes > 1) return ports;
  if (spec.worker_form == WorkerForm::worker && spec.worker_hosts.empty()) {
    std::vector<int> numbers;
    for (int i = 0; i < spec.nprocs; ++i) {
      ports.workers.push_back(bind_port());
      numbers.push_back(ports.workers.back().port);
    }
    spec.workers = local_workers(host_info.hostname, numbers);
    spec.workers_bound = true;
    spec.sources["workers"] = "ports bound here";
    spec.endpoints.clear();
    for (const auto& worker : spec.workers) spec.endpoints.push_back(text(worker.address));
    spec.sources["endpoints"] = "workers";
  }
  if (spec.nprocs > 1 && spec.service_address.empty()) {
    ports.service = bind_port();
    spec.service_address = text(ipc::HostPort{host_info.hostname, ports.service.port});
    spec.service_bound = true;
    spec.sources["service_address"] = "port bound here";
  }
  return ports;
}

}  // namespace accelmgr::launch
