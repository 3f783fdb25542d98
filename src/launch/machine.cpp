#include "launch/machine.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>

#include "collective/gloo/factory.hpp"

namespace accelmgr::launch {
namespace {

std::map<std::string, std::string> own_environment() {
  std::map<std::string, std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view variable = *entry;
    const auto equals = variable.find('=');
    if (equals != std::string_view::npos && equals > 0)
      found.emplace(variable.substr(0, equals), variable.substr(equals + 1));
  }
  return found;
}

// A set of the usual size is too small on machines with more than 1024 cores.
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

template <class Is>
int count_entries(const char* folder, Is&& is_device) {
  int count = 0;
  std::error_code unreadable;
  for (std::filesystem::directory_iterator entry(folder, unreadable), end; !unreadable && entry != end;
       entry.increment(unreadable))
    if (is_device(entry->path().filename().string())) ++count;
  return count;
}

// In a container the nodes are those it was given, while /proc shows all of the host; on a host that has not
// used its GPUs since it started, there are no nodes yet.
int driver_gpus() {
  constexpr std::string_view node = "nvidia";
  const int nodes = count_entries("/dev", [&](const std::string& name) {
    return name.size() > node.size() && name.starts_with(node) &&
           std::all_of(name.begin() + node.size(), name.end(),
                       [](unsigned char c) { return std::isdigit(c) != 0; });
  });
  return nodes > 0 ? nodes : count_entries("/proc/driver/nvidia/gpus", [](const auto&) { return true; });
}

std::string own_hostname() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

std::vector<std::string> own_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(first, ::freeifaddrs);
  std::vector<std::string> addresses;
  for (const auto* one = all.get(); one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const auto family = one->ifa_addr->sa_family;
    const void* address = nullptr;
    if (family == AF_INET) address = &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr;
    if (family == AF_INET6) address = &reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
    if (address != nullptr && ::inet_ntop(family, address, text.data(), text.size()) != nullptr)
      addresses.emplace_back(text.data());
  }
  return addresses;
}

std::string unavailable_because(const std::string& backend) {
  if (backend == "gloo") return collective::gloo::unavailable_because();
  return backend == "nccl" ? "this build has no NCCL" : "";
}

}  // namespace

Machine this_machine() {
  return {.environment = own_environment(),
          .cores = allowed_cores(),
          .gpus = driver_gpus(),
          .hostname = own_hostname(),
          .addresses = own_addresses(),
          .unavailable_because = unavailable_because};
}

}  // namespace accelmgr::launch
