#include "base/ipc/host_port.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "accelmgr/errors.hpp"
#include "base/parse_number.hpp"

namespace accelmgr::ipc {
namespace {

[[noreturn]] void refuse_address(std::string_view text, const std::string& why) {
  throw ConfigError(fmt::format("'{}' is not HOST:PORT: {}", text, why));
}

bool is_of_host(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
}

// Hexadecimal digits and colons, an embedded IPv4 address (::ffff:1.2.3.4), a zone (fe80::1%eth0).
bool is_of_ipv6(char c) { return is_of_host(c) || c == ':' || c == '%'; }

}  // namespace

HostPort parse_host_port(std::string_view text, int lowest_port) {
  const bool bracketed = text.starts_with('[');
  const auto end = bracketed ? text.find(']') : text.find(':');
  if (bracketed && end == std::string_view::npos) refuse_address(text, "'[' without ']'");
  if (end == std::string_view::npos) refuse_address(text, "it has no port");
  const auto host = bracketed ? text.substr(1, end - 1) : text.substr(0, end);
  const auto rest = text.substr(bracketed ? end + 1 : end);
  if (!bracketed && std::ranges::count(text, ':') > 1)
    refuse_address(text, "an IPv6 address must be in brackets ([::1]:1234)");
  if (host.empty()) refuse_address(text, "it has no host");
  if (!std::ranges::all_of(host, bracketed ? is_of_ipv6 : is_of_host))
    refuse_address(text, fmt::format("'{}' is not the name or address of a host", host));
  if (!rest.starts_with(':') || rest.size() == 1) refuse_address(text, "it has no port");
  const auto port = base::parse_number<int>(rest.substr(1));
  if (!port || *port < lowest_port || *port > highest_port)
    refuse_address(text, fmt::format("the port is '{}'; it must be a whole number from {} to {}",
                                     rest.substr(1), lowest_port, highest_port));
  return {std::string(host), *port};
}

std::string text(const HostPort& address) {
  return address.host.find(':') == std::string::npos ? fmt::format("{}:{}", address.host, address.port)
                                                     : fmt::format("[{}]:{}", address.host, address.port);
}

}  // namespace accelmgr::ipc
