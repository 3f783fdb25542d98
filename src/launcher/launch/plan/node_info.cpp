#include "launcher/launch/plan/node_info.hpp"

#include <utility>

#include "accelmgr/errors.hpp"
#include "base/ipc/cores.hpp"
#include "base/ipc/device_nodes.hpp"
#include "base/ipc/network.hpp"
#include "launcher/launch/plan/environment_scope.hpp"

namespace accelmgr::launch {

std::string own_hostname() {
  const auto name = ipc::host_name();
  return name.empty() ? "localhost" : name;
}

namespace {

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  try {
    for (auto& address : ipc::interface_addresses()) addresses.push_back(std::move(address.host));
  } catch (const SystemError&) {
    // The addresses only help to find this node in a list. Its name may be enough for that.
  }
  return addresses;
}

}  // namespace

NodeInfo this_node() {
  return {.environment = own_environment(),
          .cores = ipc::allowed_cores(),
          .gpus = ipc::driver_gpus(),
          .hostname = own_hostname(),
          .addresses = own_addresses()};
}

}  // namespace accelmgr::launch
