#include "launch/host_info.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "accelmgr/errors.hpp"
#include "collective/gloo/load.hpp"
#include "ipc/accelerators.hpp"
#include "ipc/network.hpp"
#include "launch/environment_scope.hpp"

namespace accelmgr::launch {
namespace {

// Grows the set, because the default size is too small on machines with more than 1024 cores.
int allowed_cores() {
  for (std::size_t cores = CPU_SETSIZE; cores <= (1u << 20); cores *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cores),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const auto bytes = CPU_ALLOC_SIZE(cores);
    if (set != nullptr && ::sched_getaffinity(0, bytes, set.get()) == 0)
      return std::max(1, CPU_COUNT_S(bytes, set.get()));
  }
  return 1;
}

std::string own_hostname() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  try {
    for (auto& address : ipc::interface_addresses()) addresses.push_back(std::move(address.host));
  } catch (const SystemError&) {
    // The addresses only help to find this host in a list. Its name may be enough for that.
  }
  return addresses;
}

std::string unavailable_because(const std::string& backend) {
  if (backend == "gloo") return collective::gloo::unavailable_because();
  return "";  // Whether NCCL can be used is found out in the ranks, which load it.
}

}  // namespace

HostInfo this_host() {
  return {.environment = own_environment(),
          .cores = allowed_cores(),
          .gpus = ipc::driver_gpus(),
          .hostname = own_hostname(),
          .addresses = own_addresses(),
          .unavailable_because = unavailable_because};
}

}  // namespace accelmgr::launch
