#include "engine/service/origin.hpp"

#include <fmt/format.h>

#include <boost/algorithm/string/predicate.hpp>
#include <boost/asio/ip/address.hpp>
#include <string_view>

namespace accelmgr::service {
namespace {

constexpr const char* curl_hint = "ask as curl --unix-socket PATH http://localhost/... does";

/// The host of HOST:PORT, without the brackets of an address of IPv6.
std::string_view name_of(std::string_view host) {
  if (!host.starts_with('[')) return host.substr(0, host.find(':'));
  const auto end = host.find(']');
  const bool is_address = end != std::string_view::npos && (end + 1 == host.size() || host[end + 1] == ':');
  return is_address ? host.substr(1, end - 1) : host;
}

/// Whether nobody on the internet can own this name. Nobody is given a name without a dot (ICANN's SAC053).
bool is_of_no_domain(std::string_view name) {
  boost::system::error_code is_name;
  boost::asio::ip::make_address(std::string(name), is_name);
  return !is_name || name.find('.') == std::string_view::npos || name.ends_with(".localhost");
}

bool is_of_this_site(const Request& request) {
  if (const auto site = request.header_field("sec-fetch-site"); !site.empty())
    return site == "same-origin" || site == "none";
  const auto origin = request.header_field("origin");
  if (origin.empty()) return true;
  const auto scheme_end = origin.find("://");
  return scheme_end != std::string::npos &&
         boost::algorithm::iequals(std::string_view(origin).substr(scheme_end + 3),
                                   request.header_field("host"));
}

}  // namespace

void check_origin(const Request& request) {
  if (request.method != "GET" && !is_of_this_site(request))
    throw Problem(403, "other_site", "a web page of another site may not change this service",
                  {.hint = "use the service's own page, or a program that is no browser"});
  const auto host = request.header_field("host");
  const bool has_token = request.peer == nullptr;
  if (!has_token && !is_of_no_domain(name_of(host)))
    throw Problem(403, "other_site",
                  fmt::format("'{}' may be the name of somebody else's web page: without a token a service "
                              "answers to localhost, an address, or a name without a dot",
                              host),
                  {.hint = curl_hint});
}

}  // namespace accelmgr::service
