#include "service/handlers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config/loader.hpp"
#include "service/actions.hpp"
#include "service/dashboard/dashboard.hpp"
#include "service/metrics.hpp"
#include "service/query.hpp"
#include "service/status.hpp"
#include "session/step_history.hpp"

namespace accelmgr::service {
namespace {

using nlohmann::json;

void dashboard(Service&, const Request&, const Respond& respond) {
  respond({.body = std::string(dashboard_page),
           .type = "text/html; charset=utf-8",
           .header = {{"Content-Security-Policy", std::string(dashboard_policy)},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"}}});
}

void status(Service& service, const Request&, const Respond& respond) {
  respond(json_response(status_of(service)));
}

void runners(Service& service, const Request&, const Respond& respond) {
  respond(json_response({{"runners", runners_of(service)}}));
}

void configuration(Service& service, const Request&, const Respond& respond) {
  respond({.body = config::to_yaml(service.manager().config()), .type = "application/yaml"});
}

void healthz(Service&, const Request&, const Respond& respond) { respond(json_response({{"alive", true}})); }

void readyz(Service& service, const Request&, const Respond& respond) {
  check_ready(service);
  respond(json_response({{"ready", true}}));
}

/// The steps after number `since` that the session still has, oldest first. With `first` a client sees what
/// it has missed; `next` is the `since` of its next request. A number beyond the last one is of an earlier
/// service: then all steps are new.
void steps(Service& service, const Request& request, const Respond& respond) {
  const auto parameter = [&](const char* name, std::uint64_t otherwise, std::uint64_t least,
                             std::uint64_t most) {
    const auto found = request.query.find(name);
    return found == request.query.end() ? otherwise : whole_number(found->second, name, least, most);
  };
  auto since = parameter("since", 0, 0, most_steps);
  const auto limit = parameter("limit", session::max_step_records, 1, session::max_step_records);
  const auto& session = service.manager().session();
  const auto recorded = session::recorded_steps(session);
  const auto first = session::first_step_record(recorded);
  if (since > recorded) since = 0;
  json found = json::array();
  auto next = since;
  for (auto number = std::max(since + 1, first); number <= recorded && found.size() < limit; ++number) {
    const auto record = session::step_record(session, number);
    if (!record) continue;  // The host has gone on: it is written over.
    found.push_back(record_of(number, *record));
    next = number;
  }
  respond(json_response({{"steps", found}, {"first", first}, {"next", next}}));
}

void metrics(Service& service, const Request&, const Respond& respond) {
  respond({.body = metrics_of(service), .type = metrics_type});
}

void events(Service& service, const Request& request, const Respond& respond) {
  auto& events = service.events();
  std::optional<Events::Position> since;
  // The header is what a client sends by itself when it connects again.
  if (const auto last = request.header_field("last-event-id"); !last.empty())
    since = events.position_in(last, "Last-Event-ID");
  else if (const auto found = request.query.find("since"); found != request.query.end())
    since = events.position_in(found->second, "since");
  if (!events.has_room())
    throw Problem(503, "too_many_subscribers",
                  fmt::format("{} clients watch the events already", Events::most_subscribers),
                  {.hint = "close one, or ask GET /v1/steps now and then"});
  respond({.type = "text/event-stream", .stream = [&events, since](std::weak_ptr<Stream> client) {
             events.subscribe(std::move(client), since);
           }});
}

struct Route {
  const char* method;
  const char* path;
  void (*serve)(Service&, const Request&, const Respond&);
  std::set<std::string> query{};  ///< The names of its parameters.
};

/// What a client may have without a token.
const std::set<std::string> open_to_all{"/", "/healthz"};

const Route routes[] = {{"GET", "/", dashboard},
                        {"GET", "/v1/status", status},
                        {"GET", "/v1/runners", runners},
                        {"GET", "/v1/config", configuration},
                        {"GET", "/v1/steps", steps, {"since", "limit"}},
                        {"GET", "/v1/events", events, {"since"}},
                        {"GET", "/metrics", metrics},
                        {"GET", "/healthz", healthz},
                        {"GET", "/readyz", readyz},
                        {"GET", "/v1/attach", attach},
                        {"POST", "/v1/step", step},
                        {"POST", "/v1/zero_grad", zero_grad},
                        {"POST", "/v1/resize", resize},
                        {"POST", "/v1/restart", restart, {"rank"}},
                        {"POST", "/v1/checkpoint", checkpoint},
                        {"POST", "/v1/stop", stop}};

}  // namespace

void handle(Service& service, const Request& request, const Respond& respond) {
  if (!request.is_admitted && !open_to_all.contains(request.path))
    throw Problem(401, "no_token", "the request does not state the token of this service",
                  {.hint = "send Authorization: Bearer TOKEN; a token in the address is not read",
                   .header = {{"WWW-Authenticate", "Bearer"}}});
  std::vector<std::string> methods;
  for (const auto& route : routes) {
    if (request.path != route.path) continue;
    if (request.method == route.method) {
      check_query(request, route.query);
      return route.serve(service, request, respond);
    }
    methods.emplace_back(route.method);
  }
  if (!methods.empty())
    throw Problem(405, "wrong_method", fmt::format("{} does not take {}", request.path, request.method),
                  {.hint = fmt::format("use {}", fmt::join(methods, ", ")),
                   .header = {{"Allow", fmt::format("{}", fmt::join(methods, ", "))}}});
  throw Problem(404, "unknown_request", fmt::format("there is no {}", request.path));
}

}  // namespace accelmgr::service
