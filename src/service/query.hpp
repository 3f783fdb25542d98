// The parameters of a request: those of its query, and the fields of its body.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>

#include "accelmgr/errors.hpp"
#include "service/request.hpp"

namespace accelmgr::service {

/// The largest number of a step, an incident, ...
inline constexpr std::uint64_t most_steps = std::numeric_limits<std::int64_t>::max();

/// The number that `text` is. Throws Problem, which names `what` and the numbers that are allowed.
std::uint64_t whole_number(const std::string& text, const std::string& what, std::uint64_t least,
                           std::uint64_t most);
/// Throws Problem for a parameter that is not in `known`.
void check_query(const Request& request, const std::set<std::string>& known);

/// The fields of a request's body; no body is an object without fields. Throws Problem for a field that is
/// not in `known`.
nlohmann::json body_of(const Request& request, const std::set<std::string>& known);

/// Calls `read`, and throws Problem for a wrong field.
template <class Read>
auto checked(Read&& read) {
  try {
    return read();
  } catch (const SessionError& error) {
    throw Problem(400, "bad_request", error.what());
  }
}

}  // namespace accelmgr::service
