#include "collective/address.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::collective {
namespace {

struct Entry {
  std::string interface;
  std::string address;
  bool loopback;
};

std::string numeric(const sockaddr* address) {
  const auto length = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::array<char, NI_MAXHOST> text{};
  const int error = getnameinfo(address, static_cast<socklen_t>(length), text.data(), text.size(), nullptr, 0,
                                NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

bool is_link_local(const sockaddr* address) noexcept {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

/// Of all interfaces that are up: those of IPv4 before those of IPv6.
std::vector<Entry> entries() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw SystemError("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Entry> found;
  for (const int family : {AF_INET, AF_INET6})
    for (const auto* item = list; item != nullptr; item = item->ifa_next) {
      const auto* address = item->ifa_addr;
      if (address == nullptr || address->sa_family != family || (item->ifa_flags & IFF_UP) == 0) continue;
      if (!is_link_local(address))
        found.push_back({item->ifa_name, numeric(address), (item->ifa_flags & IFF_LOOPBACK) != 0});
    }
  return found;
}

std::set<std::string> addresses_of_own_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return {};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(name.data(), nullptr, &hints, &list) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  std::set<std::string> found;
  for (const auto* item = list; item != nullptr; item = item->ai_next) found.insert(numeric(item->ai_addr));
  return found;
}

/// Empty when there is none.
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
    return found == all.end() ? std::string() : found->address;
  };
  if (!interface.empty()) {
    auto address = first([&](const Entry& entry) { return entry.interface == interface; });
    if (!address.empty()) return address;
    std::set<std::string> names;
    for (const auto& entry : all) names.insert(entry.interface);
    throw ConfigError(
        fmt::format("there is no network interface '{}' that is up and has an address; there {} {}",
                    interface, names.size() == 1 ? "is" : "are", fmt::join(names, ", ")));
  }
  const auto own = addresses_of_own_name();
  const auto route = interface_of_default_route();
  auto address = first([&](const Entry& entry) { return !entry.loopback && own.contains(entry.address); });
  if (address.empty()) address = first([&](const Entry& entry) { return entry.interface == route; });
  if (address.empty()) address = first([](const Entry& entry) { return !entry.loopback; });
  return address.empty() ? "127.0.0.1" : address;
}

}  // namespace accelmgr::collective
