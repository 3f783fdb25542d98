// The requests that a service knows: which there are, what they take, and what they answer. Requests are
// checked against this, and GET /openapi.json describes it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/service/request.hpp"

namespace accelmgr::service {

class Service;

/// The largest number of a step, an incident, ...
inline constexpr std::uint64_t most_steps = std::numeric_limits<std::int64_t>::max();

/// A parameter of a query, or a field of a body.
struct Parameter {
  enum class Type { integer, number, flag, position, place };

  const char* name;
  Type type;  ///< `position` is one of events, `place` one of a trace.
  const char* meaning;
  std::uint64_t least = 0;
  std::uint64_t most = most_steps;
  bool required = false;
};

/// Serves a request that was checked, or throws Problem. Does not block: `respond` may be called later.
using Serve = void (*)(Service&, const Request&, const Respond&);

struct Route {
  const char* method;
  const char* path;
  const char* summary;
  Serve serve;
  bool acts = false;  ///< It is served by the supervisor's thread. Others only read, by the clients' thread.
  std::vector<Parameter> query{};
  std::vector<Parameter> body{};
  /// The media type of the answer, or the name of its JSON schema in openapi.cpp.
  const char* answer;
  bool is_open = false;  ///< Clients over TCP need no token.
};

/// The description in OpenAPI 3.1. `highest_rank`: that of the session.
std::string openapi_of(const std::vector<Route>& routes, int highest_rank);

}  // namespace accelmgr::service
