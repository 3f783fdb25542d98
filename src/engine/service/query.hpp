// The parameters of a request: those of its query, and the fields of its body.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/service/request.hpp"
#include "engine/service/route.hpp"

namespace accelmgr::service {

/// The number that `text` is. Throws Problem, which names `what` and the numbers that are allowed.
std::uint64_t whole_number(const std::string& text, const std::string& what, std::uint64_t least,
                           std::uint64_t most);
/// Throws Problem for a parameter that is not in `known`, one that is missing, or a number that is wrong.
void check_query(const Request& request, const std::vector<Parameter>& known);
/// A parameter of a query that was checked.
std::uint64_t number_in(const Request& request, const char* name, std::uint64_t otherwise);

/// The fields of a request's body; no body is an object without fields. Throws Problem for a field that is
/// not in `known`, one that is missing, or a value that is wrong.
nlohmann::json checked_body(const Request& request, const std::vector<Parameter>& known);

}  // namespace accelmgr::service
