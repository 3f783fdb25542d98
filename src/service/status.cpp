#include "service/status.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/timing.hpp"
#include "ipc/process.hpp"
#include "session/stored_text.hpp"

namespace accelmgr::service {
namespace {

using manager::Lease;
using nlohmann::json;

const char* name_of(session::RunnerState state) {
  switch (state) {
    case session::RunnerState::absent:
      return "absent";
    case session::RunnerState::starting:
      return "starting";
    case session::RunnerState::ready:
      return "ready";
    case session::RunnerState::retiring:
      return "retiring";
    case session::RunnerState::lost:
      return "lost";
  }
  return "unknown";
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

json runners_of(Service& service) {
  const auto& session = service.manager().session();
  const auto& counters = session.counters(session.word().index);
  const auto team = session.control().team.load();
  const auto& supervisor = service.manager().supervisor();
  json runners = json::array();
  for (int rank = 0; rank < session.ranks(); ++rank) {
    const auto& record = session.record(rank);
    const auto state = record.state.load();
    if ((team >> rank & 1) == 0 && state == session::RunnerState::absent) continue;
    const bool is_ready = state == session::RunnerState::ready;
    runners.push_back({{"rank", rank},
                       {"pid", record.pid.load()},
                       {"generation", record.generation.load()},
                       {"in_team", (team >> rank & 1) != 0},
                       {"state", name_of(state)},
                       {"phase", session::to_string(record.phase.load())},
                       {"attempt", record.attempt.load()},
                       {"samples", counters.rank_samples[rank]},
                       {"silent_s", is_ready ? json(timing::seconds(supervisor.silent_ns(rank))) : json()},
                       {"queued_batches", queued_batches(session, rank)},
                       {"queue_slots", session.header().slots}});
  }
  return runners;
}

json status_of(Service& service) {
  const auto& session = service.manager().session();
  const auto lease = service.manager().lease().standing();
  const auto word = session.word();
  const auto& counters = session.counters(word.index);
  const auto& control = session.control();
  const auto not_ready = why_not_ready(service);
  const auto& directory = service.manager().config().checkpoint.directory;
  return {
      {"ready", !not_ready},
      {"why_not_ready", not_ready ? json(not_ready->why) : json()},
      {"pid", getpid()},
      {"run_id", service.run_id()},
      {"version", ACCELMGR_VERSION},
      {"uptime_s", service.uptime_s()},
      {"model", service.manager().config().model.kind},
      {"data", service.manager().config().data.kind},
      {"host", host_of(lease)},
      {"leases", lease.number},
      {"unfinished", lease.unfinished.empty() ? json() : json(lease.unfinished)},
      {"stepping", !word.closed},
      {"steps", counters.steps},
      {"attempts", word.attempt},
      {"samples", counters.samples},
      {"elements", counters.elements},
      {"skips", counters.skips},
      {"losses", control.incidents.load()},
      {"replacements", control.replacements.load()},
      {"parameter_version", control.parameter_version.load()},
      {"session_bytes", session::session_bytes(session.header(), __builtin_popcount(control.team.load()))},
      {"checkpoint_directory", directory.empty() ? json() : json(directory)},
      {"max_runners", session.ranks()},
      {"runners", runners_of(service)}};
}

json host_of(const Lease::Standing& lease) {
  if (lease.state == Lease::State::free) return nullptr;
  return {{"name", lease.name},
          {"pid", lease.pid},
          {"lease", lease.number},
          {"leaving", lease.state == Lease::State::leaving}};
}

json result_of(const StepResult& result) {
  json scalars = json::object();
  for (const auto& [name, value] : result.scalars) scalars[name] = value;
  return {{"status", to_string(result.status)},
          {"counted", result.counted},
          {"step", result.step},
          {"attempt", result.attempt},
          {"loss", result.loss},
          {"samples", result.samples},
          {"scalars", scalars},
          {"nonfinite", result.nonfinite},
          {"participants", result.participants},
          {"tries", result.tries},
          {"step_ms", result.step_ms},
          {"compute_ms", result.compute_ms},
          {"reduce_ms", result.reduce_ms},
          {"wait_ms", result.wait_ms},
          {"data_ms", result.data_ms}};
}

std::string record_text(std::uint64_t number, const session::StepRecord& record) {
  const auto ms = [](std::int64_t ns) { return double(ns) / 1e6; };
  return fmt::format(
      R"({{"number":{},"time_s":{},"step":{},"attempt":{},"status":"{}","counted":{},"loss":{},"samples":{},)"
      R"("participants":{},"tries":{},"step_ms":{},"compute_ms":{},"reduce_ms":{},"wait_ms":{},"data_ms":{}}})",
      number, double(record.time_ns) / 1e9, record.step, record.attempt, to_string(record.status),
      record.counted != 0, std::isfinite(record.loss) ? fmt::format("{}", record.loss) : "null",
      record.samples, record.participants, record.tries, ms(record.duration_ns), ms(record.compute_ns),
      ms(record.reduce_ns), ms(record.wait_ns), ms(record.data_ns));
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
