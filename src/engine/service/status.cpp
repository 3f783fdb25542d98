#include "engine/service/status.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/enum_names.hpp"
#include "base/ipc/process.hpp"
#include "base/timing.hpp"
#include "engine/session/step_fields.hpp"
#include "engine/session/step_history.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::service {
namespace {

using manager::Lease;
using nlohmann::json;

const char* name_of(session::RunnerState state) {
  static constexpr const char* names[]{"absent", "starting", "ready", "retiring", "lost"};
  return base::enum_name<session::RunnerState::lost>(names, state);
}

}  // namespace

std::uint64_t queued_batches(const session::Session& session, int rank) {
  const auto published = session.queue(rank).published.load();
  const auto used = session.counters(session.word().index).batches[rank];
  return published > used ? published - used : 0;
}

std::optional<NotReady> why_not_ready(Service& service) {
  const auto& control = service.manager().session().control();
  if (control.given_up.load() != 0)
    return NotReady{
        "given_up",
        fmt::format("lost runners are not replaced any more: {}", session::text_of(control.given_up_why)),
        "the service ends; start it again, and it goes on from its last checkpoint"};
  if (service.is_closing()) return NotReady{"closing", "the service is being stopped"};
  if (!service.manager().supervisor().has_started()) return NotReady{"not_ready", "the runners are starting"};
  return std::nullopt;
}

namespace {

/// What a field of an answer is called, its schema, and its value.
template <class Source>
struct Field {
  const char* name;
  const char* schema;
  json (*value)(const Source&);
};

template <class Source, std::size_t count>
json object_of(const Field<Source> (&fields)[count], const Source& source) {
  json object;
  for (const auto& field : fields) object[field.name] = field.value(source);
  return object;
}

template <class Source, std::size_t count>
json schema_of(const Field<Source> (&fields)[count]) {
  json schema;
  for (const auto& field : fields) {
    schema["required"].push_back(field.name);
    schema["properties"][field.name] = json::parse(field.schema);
  }
  return schema;
}

struct RunnerNow {
  const session::Session& session;
  const session::RankRecord& record;
  const session::Counters& counters;
  session::RankMask team;
  int rank;
  std::int64_t silent_ns;
};

constexpr Field<RunnerNow> runner_fields[] = {
    {"rank", R"({"type": "integer"})", [](const RunnerNow& of) -> json { return of.rank; }},
    {"pid", R"({"type": "integer"})", [](const RunnerNow& of) -> json { return of.record.pid.load(); }},
    {"generation", R"({"type": "integer", "description": "Counts the processes that this rank has had"})",
     [](const RunnerNow& of) -> json { return of.record.generation.load(); }},
    {"in_team", R"({"type": "boolean", "description": "It takes part in the next step"})",
     [](const RunnerNow& of) -> json { return (of.team >> of.rank & 1) != 0; }},
    {"state", R"({"enum": ["absent", "starting", "ready", "retiring", "lost"]})",
     [](const RunnerNow& of) -> json { return name_of(of.record.state.load()); }},
    {"phase",
     R"({"enum": ["none", "init", "waiting", "data", "forward", "backward", "vote", "reduce", "update", "stopping"]})",
     [](const RunnerNow& of) -> json { return session::to_string(of.record.phase.load()); }},
    {"attempt", R"({"type": "integer", "description": "The last one that it began"})",
     [](const RunnerNow& of) -> json { return of.record.attempt.load(); }},
    {"samples", R"({"type": "integer"})",
     [](const RunnerNow& of) -> json { return std::uint64_t{of.counters.rank_samples[of.rank]}; }},
    {"silent_s",
     R"({"type": ["number", "null"],
         "description": "For how long it has given no sign of life in a step; null: it is not ready"})",
     [](const RunnerNow& of) -> json {
       const bool is_ready = of.record.state.load() == session::RunnerState::ready;
       return is_ready ? json(timing::seconds(of.silent_ns)) : json();
     }},
    {"queued_batches", R"({"type": "integer", "description": "Loaded, and used by no step that counted"})",
     [](const RunnerNow& of) -> json { return queued_batches(of.session, of.rank); }},
    {"queue_slots", R"({"type": "integer", "description": "For how many batches its queue has room"})",
     [](const RunnerNow& of) -> json { return of.session.header().slots; }},
};

constexpr Field<Lease::Standing> host_fields[] = {
    {"name", R"({"type": "string"})", [](const Lease::Standing& of) -> json { return of.name; }},
    {"pid", R"({"type": "integer"})", [](const Lease::Standing& of) -> json { return of.pid; }},
    {"lease", R"({"type": "integer", "description": "Counts the hosts that this service has had"})",
     [](const Lease::Standing& of) -> json { return of.number; }},
    {"leaving", R"({"type": "boolean", "description": "It drives no more, but its process has not ended"})",
     [](const Lease::Standing& of) -> json { return of.state == Lease::State::leaving; }},
};

struct Now {
  Service& service;
  const session::Session& session;
  Lease::Standing lease;
  std::optional<NotReady> not_ready;
  session::StepWord word;
  const session::Counters& counters;
  const session::Control& control;
};

template <class T>
json json_of(const T& value) {
  return value;
}
json json_of(StepStatus status) { return to_string(status); }
json json_of(const std::vector<std::pair<std::string, double>>& scalars) {
  json object = json::object();
  for (const auto& [name, value] : scalars) object[name] = value;
  return object;
}

/// Appends a value of JSON to a text.
template <class T>
void append(std::string& text, const T& value) {
  fmt::format_to(std::back_inserter(text), "{}", value);
}
void append(std::string& text, StepStatus status) {
  fmt::format_to(std::back_inserter(text), R"("{}")", to_string(status));
}
void append(std::string& text, double value) {
  if (std::isfinite(value))
    fmt::format_to(std::back_inserter(text), "{}", value);
  else
    text += "null";
}

const Config& config_of(const Now& of) { return of.service.manager().config(); }
json text_or_null(const std::string& text) { return text.empty() ? json() : json(text); }

constexpr Field<Now> status_fields[] = {
    {"ready", R"({"type": "boolean", "description": "A step could be made"})",
     [](const Now& of) -> json { return !of.not_ready; }},
    {"why_not_ready", R"({"type": ["string", "null"]})",
     [](const Now& of) -> json { return of.not_ready ? json(of.not_ready->why) : json(); }},
    {"pid", R"({"type": "integer"})", [](const Now&) -> json { return getpid(); }},
    {"run_id", R"({"type": "string"})", [](const Now& of) -> json { return of.service.run_id(); }},
    {"version", R"({"type": "string"})", [](const Now&) -> json { return ACCELMGR_VERSION; }},
    {"uptime_s", R"({"type": "number"})", [](const Now& of) -> json { return of.service.uptime_s(); }},
    {"model", R"({"type": "string"})", [](const Now& of) -> json { return config_of(of).model.kind; }},
    {"data", R"({"type": "string"})", [](const Now& of) -> json { return config_of(of).data.kind; }},
    {"host", R"({"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/Host"}]})",
     [](const Now& of) -> json { return host_of(of.lease); }},
    {"leases", R"({"type": "integer"})", [](const Now& of) -> json { return of.lease.number; }},
    {"unfinished", R"({"type": ["string", "null"], "description": "What a host left half written"})",
     [](const Now& of) -> json { return text_or_null(of.lease.unfinished); }},
    {"stepping", R"({"type": "boolean", "description": "A step is under way"})",
     [](const Now& of) -> json { return !of.word.closed; }},
    {"steps", R"({"type": "integer"})",
     [](const Now& of) -> json { return std::uint64_t{of.counters.steps}; }},
    {"attempts", R"({"type": "integer"})", [](const Now& of) -> json { return of.word.attempt; }},
    {"samples", R"({"type": "integer"})",
     [](const Now& of) -> json { return std::uint64_t{of.counters.samples}; }},
    {"elements", R"({"type": "integer"})",
     [](const Now& of) -> json { return std::uint64_t{of.counters.elements}; }},
    {"skips", R"({"type": "integer"})",
     [](const Now& of) -> json { return std::uint64_t{of.counters.skips}; }},
    {"losses", R"({"type": "integer", "description": "Of processes"})",
     [](const Now& of) -> json { return of.control.incidents.load(); }},
    {"replacements", R"({"type": "integer"})",
     [](const Now& of) -> json { return of.control.replacements.load(); }},
    {"parameter_version", R"({"type": "integer"})",
     [](const Now& of) -> json { return of.control.parameter_version.load(); }},
    {"session_bytes", R"({"type": "integer"})",
     [](const Now& of) -> json { return of.session.used_bytes(__builtin_popcount(of.control.team.load())); }},
    {"checkpoint_directory", R"({"type": ["string", "null"]})",
     [](const Now& of) -> json { return text_or_null(config_of(of).checkpoint.directory); }},
    {"max_runners", R"({"type": "integer", "description": "The service can be resized up to it"})",
     [](const Now& of) -> json { return of.session.ranks(); }},
    {"runners", R"({"type": "array", "items": {"$ref": "#/components/schemas/Runner"}})",
     [](const Now& of) -> json { return runners_of(of.service); }},
};

}  // namespace

json runners_of(Service& service) {
  const auto& session = service.manager().session();
  const auto team = session.control().team.load();
  json runners = json::array();
  for (int rank = 0; rank < session.ranks(); ++rank) {
    const auto& record = session.record(rank);
    if ((team >> rank & 1) == 0 && record.state.load() == session::RunnerState::absent) continue;
    runners.push_back(object_of(runner_fields, {session, record, session.counters(session.word().index), team,
                                                rank, service.manager().supervisor().silent_ns(rank)}));
  }
  return runners;
}

json status_of(Service& service) {
  const auto& session = service.manager().session();
  const auto word = session.word();
  return object_of(status_fields,
                   {service, session, service.manager().lease().standing(), why_not_ready(service), word,
                    session.counters(word.index), session.control()});
}

json host_of(const Lease::Standing& lease) {
  return lease.state == Lease::State::free ? json() : object_of(host_fields, lease);
}

json status_schemas() {
  return {{"Runner", schema_of(runner_fields)},
          {"Host", schema_of(host_fields)},
          {"Status", schema_of(status_fields)}};
}

json result_of(const StepResult& result) {
  json answer;
  session::each_step_field<session::StepFields::told>(
      [&](const char* name, auto member, const char*) { answer[name] = json_of(result.*member); });
  return answer;
}

std::string record_text(std::uint64_t number, const session::StepRecord& record) {
  const auto result = session::result_of(record);
  auto text = fmt::format(R"({{"number":{},"time_s":{})", number, double(record.time_ns) / 1e9);
  session::each_recorded_field([&](const char* name, auto member, auto) {
    fmt::format_to(std::back_inserter(text), R"(,"{}":)", name);
    append(text, result.*member);
  });
  return text += '}';
}

json incident_of(std::uint64_t number, const session::Incident& incident) {
  return {{"number", number},
          {"time_s", double(incident.time_ns) / 1e9},
          {"rank", incident.rank},
          {"pid", incident.pid},
          {"phase", incident.rank < 0 ? json() : json(session::to_string(incident.phase))},
          {"step", incident.step},
          {"attempt", incident.attempt},
          {"exit", ipc::describe_exit(incident.exit_status)},
          {"what", session::text_of(incident.what)},
          {"log", session::text_of(incident.log)}};
}

}  // namespace accelmgr::service
