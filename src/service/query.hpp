// The parameters of a request's query.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "service/request.hpp"

namespace accelmgr::service {

/// The largest number of a step, an incident, ...
inline constexpr std::uint64_t most_steps = std::numeric_limits<std::int64_t>::max();

/// The number that `text` is. Throws Problem, which names `what` and the numbers that are allowed.
std::uint64_t whole_number(const std::string& text, const std::string& what, std::uint64_t least,
                           std::uint64_t most);
/// Throws Problem for a parameter that is not in `known`.
void check_query(const Request& request, const std::set<std::string>& known);

}  // namespace accelmgr::service
