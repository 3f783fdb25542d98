#include "engine/service/handlers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/config/loader.hpp"
#include "engine/service/actions.hpp"
#include "engine/service/dashboard/dashboard.hpp"
#include "engine/service/metrics.hpp"
#include "engine/service/origin.hpp"
#include "engine/service/query.hpp"
#include "engine/service/status.hpp"
#include "engine/service/trace.hpp"
#include "engine/session/step_history.hpp"

namespace accelmgr::service {
namespace {

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
  auto since = number_in(request, "since", 0);
  const auto limit = number_in(request, "limit", session::max_step_records);
  const auto& session = service.manager().session();
  const auto recorded = session::recorded_steps(session);
  const auto first = session::first_step_record(recorded);
  if (since > recorded) since = 0;
  std::vector<std::string> found;
  auto next = since;
  for (auto number = std::max(since + 1, first); number <= recorded && found.size() < limit; ++number) {
    const auto record = session::step_record(session, number);
    if (!record) continue;  // The host has gone on: it is written over.
    found.push_back(record_text(number, *record));
    next = number;
  }
  respond({.body = fmt::format("{{\"steps\":[{}],\"first\":{},\"next\":{}}}\n", fmt::join(found, ","), first,
                               next)});
}

void pending(Service& service, const Request& request, const Respond& respond) {
  respond(json_response(service.pending_steps().since(number_in(request, "since", 0))));
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

constexpr std::uint64_t longest_step_s = 100'000'000;  // As in the configuration.

Route get(const char* path, Serve serve, const char* answer, const char* summary,
          std::vector<Parameter> query = {}) {
  return {.method = "GET",
          .path = path,
          .summary = summary,
          .serve = serve,
          .query = std::move(query),
          .answer = answer};
}

/// A POST request changes something, so the supervisor's thread serves it (Route::acts).
Route post(const char* path, Serve serve, const char* answer, const char* summary,
           std::vector<Parameter> body = {}) {
  return {.method = "POST",
          .path = path,
          .summary = summary,
          .serve = serve,
          .acts = true,
          .body = std::move(body),
          .answer = answer};
}

Route acting(Route route) {
  route.acts = true;
  return route;
}

Route opened(Route route) {
  route.is_open = true;
  return route;
}

void openapi(Service& service, const Request& request, const Respond& respond);

const std::vector<Route>& routes() {
  using enum Parameter::Type;
  static const std::vector<Route> all{
      opened(get("/", dashboard, "text/html", "The dashboard, for a browser")),
      get("/v1/status", status, "Status", "How the service is"),
      get("/v1/runners", runners, "Runners", "The runners"),
      acting(get("/v1/config", configuration, "application/yaml",
                 "The configuration, with the devices that were chosen")),
      get("/v1/steps", steps, "Steps", "The last calls of step()",
          {{"since", integer, "The number after which they begin; 0: all that are kept"},
           {"limit", integer, "How many at most", 1, session::max_step_records}}),
      get("/v1/events", events, "text/event-stream",
          "What happens, as it happens: host, step, incident and closing, as server-sent events",
          {{"since", position, "The id of an event, or the number of a step, after which they begin"}}),
      get("/v1/trace", trace, "Trace", "What each thread of the session did, for accelmgr trace",
          {{"since", place, "now, or `next` of an earlier answer, after which it begins"}}),
      acting(get("/v1/attach", attach, "application/octet-stream",
                 "Makes the process that asks over a Unix socket the host; for accelmgr's own libraries")),
      get("/v1/observe", observe, "application/octet-stream",
          "Lets the process that asks over a Unix socket read the session; for accelmgr's own libraries"),
      post("/v1/step", step, "StepsMade", "Makes steps, if no host drives the session",
           {{"count", integer, "How many; 1. At most 1,000 if the request waits", 1, PendingSteps::most},
            {"accumulate", flag, "Whether gradients are added to those that are there; true"},
            {"update", flag,
             "Whether they are inner steps, with the numbers of the last one that a host has made; false"},
            {"wait", flag,
             "Whether the answer comes when they are made; if not, GET /v1/pending tells of them; true"},
            {"timeout_s", number, "For each step; step_timeout", 0, longest_step_s}}),
      get("/v1/pending", pending, "Pending",
          "The steps that were begun last without waiting for them, with their results",
          {{"since", integer, "How many results are known, and not told; 0"}}),
      post("/v1/cancel", cancel, "Pending",
           "Ends these steps before the next one; answers when they are over"),
      post("/v1/zero_grad", zero_grad, "Zeroed", "Sets the gradients to zero, if no host drives the session"),
      post("/v1/resize", resize, "Runners", "Changes how many runners there are, from the next step on",
           {{"runners", integer, "How many, at most runners.max_runners", 1, session::max_ranks, true}}),
      {.method = "POST",
       .path = "/v1/restart",
       .summary = "Replaces a runner; a step that it leaves is tried again",
       .serve = restart,
       .acts = true,
       .query = {{"rank", integer, "Its rank", 0, session::max_ranks - 1, true}},
       .answer = "Runners"},
      post("/v1/checkpoint", checkpoint, "Checkpoint",
           "Writes a checkpoint; a host that drives the session is asked to, with its optimizer",
           {{"timeout_s", number, "Until when it must be written; 60", 0, longest_step_s}}),
      post("/v1/stop", stop, "Stopping", "Ends the service"),
      opened(get("/healthz", healthz, "Alive", "The service is alive")),
      get("/readyz", readyz, "Ready", "A step could be made"),
      get("/metrics", metrics, "text/plain", "Figures in the text format of Prometheus"),
      get("/openapi.json", openapi, "OpenApi", "This description")};
  return all;
}

void openapi(Service& service, const Request&, const Respond& respond) {
  respond({.body = openapi_of(routes(), service.manager().session().ranks() - 1)});
}

/// Throws Problem if there is no such route.
const Route& route_of(const Request& request) {
  std::vector<std::string> methods;
  for (const auto& route : routes()) {
    if (request.path != route.path) continue;
    if (request.method == route.method) return route;
    methods.emplace_back(route.method);
  }
  if (!methods.empty())
    throw Problem(405, "wrong_method", fmt::format("{} does not take {}", request.path, request.method),
                  {.hint = fmt::format("use {}", fmt::join(methods, ", ")),
                   .header = {{"Allow", fmt::format("{}", fmt::join(methods, ", "))}}});
  throw Problem(404, "unknown_request", fmt::format("there is no {}", request.path),
                {.hint = "GET /openapi.json says what there is"});
}

bool is_open(const Request& request) {
  return std::ranges::any_of(routes(),
                             [&](const Route& route) { return request.path == route.path && route.is_open; });
}

}  // namespace

void handle(Service& service, Request request, const Respond& respond) {
  check_origin(request);
  if (!request.is_admitted && !is_open(request))
    throw Problem(401, "no_token", "the request does not state the token of this service",
                  {.hint = "send Authorization: Bearer TOKEN; a token in the address is not read",
                   .header = {{"WWW-Authenticate", "Bearer"}}});
  const auto& route = route_of(request);
  check_query(request, route.query);
  request.fields = checked_body(request, route.body);
  if (!route.acts) return route.serve(service, request, respond);
  auto answer = [&service, respond](Response response) {
    service.tell_clients([respond, response = std::move(response)] { respond(response); });
  };
  auto serve = [&service, &route, request = std::move(request), answer = std::move(answer)] {
    try {
      route.serve(service, request, answer);
    } catch (...) {
      answer(response_of_exception());
    }
  };
  // Takes in first that a host has left, if it left before this request came: then the request sees it.
  service.act([&service, serve = std::move(serve)] {
    service.manager().lease().catch_up();
    service.act(serve);
  });
}

}  // namespace accelmgr::service
