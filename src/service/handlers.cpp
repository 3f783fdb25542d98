#include "service/handlers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/exception_text.hpp"
#include "base/fields.hpp"
#include "base/log.hpp"
#include "config/loader.hpp"
#include "service/metrics.hpp"
#include "service/query.hpp"
#include "service/status.hpp"
#include "service/trace.hpp"
#include "session/kernels.hpp"
#include "session/step_history.hpp"

namespace accelmgr::service {
namespace {

using manager::Lease;
using nlohmann::json;

constexpr int most_steps_at_once = 1000;
constexpr double longest_step_s = 1e8;  // As in the configuration.
constexpr std::size_t longest_name = 64;

/// The fields of a request's body; no body is an object without fields.
json body_of(const Request& request, const std::set<std::string>& known) {
  json body;
  try {
    body = request.body.empty() ? json::object() : base::parse_json(request.body, "the body");
  } catch (const SessionError& error) {
    throw Problem(400, "bad_request", error.what());
  }
  if (!body.is_object()) throw Problem(400, "bad_request", "the body must be a JSON object");
  for (const auto& [name, value] : body.items())
    if (!known.contains(name))
      throw Problem(400, "bad_request", fmt::format("the body has a field '{}' that is not known", name),
                    {.hint = fmt::format("the fields are {}", fmt::join(known, ", "))});
  return body;
}

/// Calls `read`, and throws Problem for a wrong field.
template <class Read>
auto checked(Read&& read) {
  try {
    return read();
  } catch (const SessionError& error) {
    throw Problem(400, "bad_request", error.what());
  }
}

void check_ready(Service& service) {
  if (const auto not_ready = why_not_ready(service)) throw Problem(503, not_ready->code, not_ready->why);
}

/// Throws Problem unless the session is free for a host, or for the service itself.
void check_free(Service& service) {
  check_ready(service);
  const auto& lease = service.manager().lease();
  const auto& host = lease.host();
  if (service.driver().is_busy())
    throw Problem(409, "host_is_ending", "the service makes steps for another request",
                  {.hint = "try again when they are done"});
  if (lease.state() == Lease::State::driven)
    throw Problem(409, "host_drives", fmt::format("{} (pid {}) drives the session", host.name, host.pid),
                  {.hint = "one host at a time drives a session; it must detach or end first"});
  if (lease.state() == Lease::State::leaving)
    throw Problem(409, "host_is_ending", fmt::format("{} (pid {}) is ending", host.name, host.pid),
                  {.hint = "try again when its process has ended"});
}

/// The same for the service itself, which does not go on with what is half written.
void check_free_for_service(Service& service) {
  check_free(service);
  if (const auto& unfinished = service.manager().lease().unfinished(); !unfinished.empty())
    throw Problem(409, "unfinished", unfinished,
                  {.hint = "attach a host that writes the parameters, or start again from a checkpoint"});
}

/// The problem that the exception under way is.
Problem problem_of_exception(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Problem& problem) {
    return problem;
  } catch (const UsageError& error) {
    return {409, "usage", error.what()};
  } catch (...) {
    return {500, "internal", base::current_exception_text()};
  }
}

Problem problem_of(const StepResult& result) {
  const int status = result.status == StepStatus::timeout                                              ? 504
                     : result.status == StepStatus::data_end || result.status == StepStatus::nonfinite ? 409
                                                                                                       : 503;
  return {status,
          to_string(result.status),
          !result.error.empty() ? result.error
          : result.status == StepStatus::data_end
              ? "the data source has ended"
              : fmt::format("the step ended as {}", to_string(result.status)),
          {.rank = result.rank, .step = static_cast<std::int64_t>(result.step)}};
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

void step(Service& service, const Request& request, const Respond& respond) {
  const auto body = body_of(request, {"count", "accumulate", "timeout_s"});
  const base::Fields fields(body, "the body");
  const auto count =
      checked([&] { return fields.has("count") ? fields.number<int>("count", 1, most_steps_at_once) : 1; });
  StepOptions options;
  checked([&] {
    if (fields.has("accumulate")) options.accumulate = fields.flag("accumulate");
    if (fields.has("timeout_s")) {
      options.timeout_s = fields.real("timeout_s");
      if (!(*options.timeout_s >= 0 && *options.timeout_s <= longest_step_s))
        fields.refuse("timeout_s", fmt::format("from 0 to {}", longest_step_s));
    }
    options.parameters_changed = false;  // Nothing but a host writes parameters.
  });
  check_free_for_service(service);
  const auto results = std::make_shared<std::vector<StepResult>>();
  const double timeout_s = options.timeout_s.value_or(service.manager().config().step_timeout);
  const auto& control = service.manager().session().control();
  service.driver().run(
      [=, &control](Drive& drive) {
        for (int i = 0; i < count && (i == 0 || control.closing.load() == 0); ++i) {
          results->push_back(drive.stepper.step(options, timeout_s));
          if (!results->back()) break;
        }
      },
      [=](const std::exception_ptr& thrown) {
        if (thrown) return respond(problem_of_exception(thrown).response());
        if (!results->back()) return respond(problem_of(results->back()).response());
        json steps = json::array();
        for (const auto& result : *results) steps.push_back(result_of(result));
        respond(json_response({{"steps", steps}}));
      });
}

void zero_grad(Service& service, const Request& request, const Respond& respond) {
  body_of(request, {});
  check_free_for_service(service);
  service.driver().run(
      [](Drive& drive) {
        session::best_kernels().zero(drive.view.gradients(), drive.view.session().master_bytes());
      },
      [=](const std::exception_ptr& thrown) {
        respond(thrown ? problem_of_exception(thrown).response() : json_response({{"zeroed", true}}));
      });
}

/// The steps after number `since` that the session still has, oldest first. With `first` a client sees what
/// it has missed; `next` is the `since` of its next request. A number beyond the last one is of an earlier
/// service: then all steps are new.
void steps(Service& service, const Request& request, const Respond& respond) {
  check_query(request, {"since", "limit"});
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
  check_query(request, {"since"});
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

void stop(Service& service, const Request& request, const Respond& respond) {
  body_of(request, {});
  service.close(fmt::format("process {} asked for it", request.peer->pid));
  respond(json_response({{"stopping", true}}, 202));
}

/// Gives the lease to the process that asks, with the socket on which it finds the session.
void attach(Service& service, const Request& request, const Respond& respond) {
  const auto build = fmt::format("{:016x}", session::build_fingerprint());
  if (request.header_field("upgrade") != "accelmgr-host")
    throw Problem(426, "upgrade_required", "a host attaches with Upgrade: accelmgr-host",
                  {.hint = "use Manager::attach() or accelmgr.attach()"});
  if (request.header_field("accelmgr-build") != build)
    throw Problem(409, "foreign_build",
                  fmt::format("this host is of build '{}', the service of build '{}'",
                              request.header_field("accelmgr-build"), build),
                  {.hint = "use the same build of accelmgr for both"});
  check_free(service);
  const auto name = request.header_field("accelmgr-host").substr(0, longest_name);
  auto& lease = service.manager().lease();
  auto socket = lease.admit({.name = name.empty() ? "a host" : name,
                             .pid = request.peer->pid,
                             .pidfd = base::duplicate(request.peer->pidfd.get())},
                            config::to_yaml(service.manager().config()), service.run_id());
  service.events().look();  // Before the host can make a step.
  respond({.status = 101,
           .fd = std::make_shared<const base::UniqueFd>(std::move(socket)),
           .undelivered = [&lease, number = lease.number()] { lease.take_back(number); }});
}

struct Route {
  const char* method;
  const char* path;
  void (*serve)(Service&, const Request&, const Respond&);
};

constexpr Route routes[] = {
    {"GET", "/v1/status", status}, {"GET", "/v1/runners", runners},      {"GET", "/v1/config", configuration},
    {"GET", "/v1/steps", steps},   {"GET", "/v1/events", events},        {"GET", "/metrics", metrics},
    {"GET", "/healthz", healthz},  {"GET", "/readyz", readyz},           {"GET", "/v1/attach", attach},
    {"POST", "/v1/step", step},    {"POST", "/v1/zero_grad", zero_grad}, {"POST", "/v1/stop", stop},
    {"GET", "/v1/trace", trace}};

}  // namespace

void handle(Service& service, const Request& request, const Respond& respond) {
  std::vector<std::string> methods;
  for (const auto& route : routes) {
    if (request.path != route.path) continue;
    if (request.method == route.method) return route.serve(service, request, respond);
    methods.emplace_back(route.method);
  }
  if (!methods.empty())
    throw Problem(405, "wrong_method", fmt::format("{} does not take {}", request.path, request.method),
                  {.hint = fmt::format("use {}", fmt::join(methods, ", "))});
  throw Problem(404, "unknown_request", fmt::format("there is no {}", request.path));
}

}  // namespace accelmgr::service
