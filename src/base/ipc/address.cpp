#include "base/ipc/address.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/network.hpp"

namespace accelmgr::ipc {
namespace {

using Entry = InterfaceAddress;

/// The addresses at which another machine may reach an interface, IPv4 before IPv6.
std::vector<Entry> entries() {
  auto found = interface_addresses();
  std::erase_if(found, [](const Entry& entry) { return !entry.up || entry.link_local; });
  return found;
}

std::set<std::string> addresses_of_own_name() {
  const auto name = host_name();
  if (name.empty()) return {};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &list) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  std::set<std::string> found;
  for (const auto* item = list; item != nullptr; item = item->ai_next) found.insert(host_of(item->ai_addr));
  return found;
}

/// Returns an empty string when there is no default route.
std::string interface_of_default_route() {
  std::ifstream routes("/proc/net/route");
  std::string line;
  std::getline(routes, line);
  while (std::getline(routes, line)) {
    std::istringstream words(line);
    std::string interface;
    std::string destination;
    if (words >> interface >> destination && destination == "00000000") return interface;
  }
  return "";
}

}  // namespace

std::string local_address(const std::string& interface) {
  const auto all = entries();
  const auto first = [&](auto&& wanted) {
    const auto found = std::ranges::find_if(all, wanted);
    return found == all.end() ? std::string() : found->host;
  };
  if (!interface.empty()) {
    auto address = first([&](const Entry& entry) { return entry.interface == interface; });
    if (!address.empty()) return address;
    std::set<std::string> names;
    for (const auto& entry : all) names.insert(entry.interface);
    throw ConfigError(
        fmt::format("there is no network interface '{}' that is up and has an address; available are: {}",
                    interface, fmt::join(names, ", ")));
  }
  const auto own = addresses_of_own_name();
  const auto route = interface_of_default_route();
  auto address = first([&](const Entry& entry) { return !entry.loopback && own.contains(entry.host); });
  if (address.empty()) address = first([&](const Entry& entry) { return entry.interface == route; });
  if (address.empty()) address = first([](const Entry& entry) { return !entry.loopback; });
  return address.empty() ? "127.0.0.1" : address;
}

}  // namespace accelmgr::ipc
