#include "launcher/launch/run/ports.hpp"

#include <fmt/format.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/tcp.hpp"
#include "launcher/launch/compat/variables.hpp"

namespace accelmgr::launch {
namespace {

/// A socket that listens on all addresses. Empty if that failed; `why` is then the errno value.
base::UniqueFd try_port(int port, int& why) {
  auto socket = ipc::try_bind_tcp("::", port, why);
  const bool no_ipv6 = why == EAFNOSUPPORT || why == EADDRNOTAVAIL || why == EPROTONOSUPPORT;
  return no_ipv6 ? ipc::try_bind_tcp("0.0.0.0", port, why) : std::move(socket);
}

}  // namespace

BoundPort bind_port(int first) {
  int why = 0;
  if (first < 0 || first > ipc::highest_port)
    throw UsageError(fmt::format("bind_port({}): a port is from 0 to {}", first, ipc::highest_port));
  for (int port = first; port <= ipc::highest_port; ++port) {
    if (auto socket = try_port(port, why)) {
      const int bound = ipc::bound_port(socket.get());
      return {std::move(socket), bound};
    }
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

WorkerPorts bind_worker_ports(LaunchSpec& spec, const NodeInfo& node_info) {
  WorkerPorts ports;
  if (spec.xla.form == WorkerForm::none || spec.nnodes > 1) return ports;
  if (spec.xla.form == WorkerForm::worker && spec.xla.nodes.empty()) {
    std::vector<int> numbers;
    for (int i = 0; i < spec.nprocs; ++i) {
      ports.workers.push_back(bind_port());
      numbers.push_back(ports.workers.back().port);
    }
    spec.xla.workers = local_workers(node_info.hostname, numbers);
    spec.xla.workers_bound = true;
    spec.sources["workers"] = "ports bound here";
    spec.endpoints.clear();
    for (const auto& worker : spec.xla.workers) spec.endpoints.push_back(text(worker.address));
    spec.sources["endpoints"] = "workers";
  }
  if (spec.nprocs > 1 && spec.xla.service_address.empty()) {
    ports.service = bind_port();
    spec.xla.service_address = text(ipc::HostPort{node_info.hostname, ports.service.port});
    spec.xla.service_bound = true;
    spec.sources["service_address"] = "port bound here";
  }
  return ports;
}

}  // namespace accelmgr::launch
