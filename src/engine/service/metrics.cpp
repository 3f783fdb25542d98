#include "engine/service/metrics.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <iterator>
#include <string_view>

#include "accelmgr/step_result.hpp"
#include "base/ipc/process.hpp"
#include "base/timing.hpp"
#include "engine/service/status.hpp"
#include "engine/session/step_history.hpp"

namespace accelmgr::service {
namespace {

/// Writes the format. Its labels are names and numbers of our own: no value needs an escape.
class Text {
 public:
  void family(const char* name, const char* type, const char* help) {
    name_ = name;
    fmt::format_to(std::back_inserter(text_), "# HELP {0} {2}\n# TYPE {0} {1}\n", name, type, help);
  }
  void sample(std::string_view labels, double value) { sample("", labels, value); }
  /// A family of one sample.
  void counter(const char* name, const char* help, double value) { one(name, "counter", help, value); }
  void gauge(const char* name, const char* help, double value) { one(name, "gauge", help, value); }
  /// Returns the number of durations.
  std::uint64_t histogram(const char* name, const char* help, const session::Durations& durations) {
    family(name, "histogram", help);
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < std::size(durations.in_bucket); ++i) {
      count += durations.in_bucket[i];
      const bool is_last = i == session::duration_bounds_ns.size();
      sample("_bucket",
             fmt::format("le=\"{}\"",
                         is_last ? "+Inf" : number(timing::seconds(session::duration_bounds_ns[i]))),
             double(count));
    }
    sample("_sum", "", timing::seconds(durations.sum_ns));
    sample("_count", "", double(count));
    return count;
  }
  std::string take() { return std::move(text_); }

 private:
  void one(const char* name, const char* type, const char* help, double value) {
    family(name, type, help);
    sample("", value);
  }
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
    return fmt::format("{}", value);
  }
  void sample(const char* suffix, std::string_view labels, double value) {
    const bool labelled = !labels.empty();
    fmt::format_to(std::back_inserter(text_), "{}{}{}{}{} {}\n", name_, suffix, labelled ? "{" : "", labels,
                   labelled ? "}" : "", number(value));
  }

  std::string text_;
  const char* name_ = "";
};

void add_steps(Text& text, const session::Session& session) {
  const auto totals = session::step_totals(session);
  const auto& counters = session.counters(session.word().index);
  text.family("accelmgr_steps_total", "counter", "Calls of step() since the service began, by their result.");
  for (std::size_t status = 0; status < session::step_statuses; ++status)
    text.sample(fmt::format("status=\"{}\"", to_string(static_cast<StepStatus>(status))),
                double(totals.calls[status]));
  const auto counted =
      text.histogram("accelmgr_step_duration_seconds",
                     "From the call of step() to its return, if it counted.", totals.duration);
  text.histogram("accelmgr_step_compute_seconds", "Forward and backward of the slowest runner.",
                 totals.compute);
  text.histogram("accelmgr_step_reduce_seconds", "Reduction of the slowest runner.", totals.reduce);
  text.histogram("accelmgr_step_wait_seconds", "The rest of a step: waiting for data and processes.",
                 totals.wait);
  text.histogram("accelmgr_step_data_seconds", "How long the runner that waited longest for batches did so.",
                 totals.data);
  if (counted > 0) text.gauge("accelmgr_loss", "Mean loss of the last step that counted.", totals.last_loss);
  text.counter("accelmgr_committed_steps_total", "Steps of the run, with those before it was resumed.",
               double(counters.steps));
  text.counter("accelmgr_samples_total", "Samples of these steps.", double(counters.samples));
}

void add_runners(Text& text, Service& service) {
  const auto& session = service.manager().session();
  const auto& control = session.control();
  const auto team = control.team.load();
  const auto each_rank = [&](auto&& value) {
    for (int rank = 0; rank < session.ranks(); ++rank)
      if ((team >> rank & 1) != 0) value(rank, fmt::format("rank=\"{}\"", rank));
  };
  text.family("accelmgr_queue_batches", "gauge",
              "Batches that are loaded and that no committed step has used.");
  each_rank(
      [&](int rank, const std::string& label) { text.sample(label, double(queued_batches(session, rank))); });
  text.family("accelmgr_runner_ready", "gauge", "1: the runner of this rank can take part in a step.");
  each_rank([&](int rank, const std::string& label) {
    text.sample(label, session.record(rank).state.load() == session::RunnerState::ready);
  });
  text.family("accelmgr_runner_heartbeat_age_seconds", "gauge",
              "How long a runner that has a step to make has given no sign of life.");
  each_rank([&](int rank, const std::string& label) {
    if (session.record(rank).state.load() == session::RunnerState::ready)
      text.sample(label, timing::seconds(service.manager().supervisor().silent_ns(rank)));
  });
  text.counter("accelmgr_incidents_total", "Processes of the session that were lost.",
               double(control.incidents.load()));
  text.counter("accelmgr_runner_restarts_total", "Runners that were started in the place of lost ones.",
               double(control.replacements.load()));
}

void add_service(Text& text, Service& service) {
  const auto& session = service.manager().session();
  const auto lease = service.manager().lease().standing();
  text.family("accelmgr_build_info", "gauge", "The version of accelmgr; always 1.");
  text.sample("version=\"" ACCELMGR_VERSION "\"", 1);
  text.gauge("accelmgr_ready", "1: a step could be made.", !why_not_ready(service));
  text.gauge("accelmgr_host_attached", "1: a host drives the session.", lease.has_host());
  text.gauge("accelmgr_parameter_version", "Grows with every update; odd while one is written.",
             double(session.control().parameter_version.load()));
  text.gauge("accelmgr_session_bytes", "Shared memory of the session.",
             double(session.used_bytes(__builtin_popcount(session.control().team.load()))));
}

/// Samples of the processes that live.
void add_processes(Text& text, Service& service) {
  text.family("accelmgr_process_private_bytes", "gauge",
              "Memory of a process that is not the session's, nor that of files.");
  const auto add = [&](const std::string& labels, pid_t pid) {
    if (const auto bytes = ipc::private_bytes(pid)) text.sample(labels, double(*bytes));
  };
  const auto& session = service.manager().session();
  const auto lease = service.manager().lease().standing();
  add("process=\"manager\"", getpid());
  if (lease.has_host()) add("process=\"host\"", lease.pid);
  for (int rank = 0; rank < session.ranks(); ++rank)
    if (session.record(rank).state.load() == session::RunnerState::ready)
      add(fmt::format("process=\"runner {}\"", rank), session.record(rank).pid.load());
}

}  // namespace

std::string metrics_of(Service& service) {
  Text text;
  add_service(text, service);
  add_steps(text, service.manager().session());
  add_runners(text, service);
  add_processes(text, service);
  return text.take();
}

}  // namespace accelmgr::service
