#include "error_report.hpp"

#include <fmt/format.h>
#include <signal.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "launcher/agent/report_file.hpp"

namespace accelmgr::program {
namespace {

using agent::hanging;
using agent::utc;
using nlohmann::ordered_json;

/// Counted from 1.
std::uint64_t failed_step(const StepResult& failure) {
  return failure.counted ? failure.step : failure.step + 1;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// True if a log line repeats the text of the exception, its first line or a later one.
bool repeats(const std::string& line, const Failure& cause) {
  if (cause.what.empty()) return false;
  return line.find(first_line(cause.what)) != std::string::npos || cause.what.find(line) != std::string::npos;
}

/// What to do about a runner that was ended by a signal from outside.
std::string advice(const Failure& cause) {
  if (cause.rank < 0 || !cause.what.empty()) return {};
  if (cause.signal == SIGKILL)
    return "if no process sent the SIGKILL, the kernel did, because memory ran out (dmesg shows it): "
           "a smaller batch_size_per_device, fewer nprocs or a smaller model need less";
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    if (cause.signal == number)
      return "it crashed in native code, the model's own or a library's; runners.on_loss=fail ends the "
             "run at the first crash, and ACCELMGR_LOG_LEVEL=debug logs every step of every runner";
  return {};
}

std::string cause_text(const Failure& cause, const std::string& headline) {
  const auto who = cause.rank < 0 ? "manager or fork server" : fmt::format("rank {}", cause.rank);
  const auto phase = cause.phase.empty() ? "" : fmt::format(" phase {},", cause.phase);
  auto text = fmt::format("\n  {} {},{} step {}, pid {}: {}", utc(cause.time_s), who, phase, cause.step,
                          cause.pid, cause.exit);
  if (headline.find(cause.what) == std::string::npos)
    text += (cause.exit.empty() ? "" : ": ") + hanging(cause.what, 4);
  for (const auto& line : cause.log)
    if (!repeats(line, cause)) text += "\n      " + hanging(line, 6);
  return text;
}

ordered_json cause_json(const Failure& cause) {
  return {{"time", utc(cause.time_s)}, {"rank", cause.rank}, {"pid", cause.pid},
          {"phase", cause.phase},      {"step", cause.step}, {"attempt", cause.attempt},
          {"exit", cause.exit},        {"what", cause.what}, {"log", cause.log}};
}

}  // namespace

std::string failure_text(const StepResult& failure) {
  auto text = fmt::format("step {} failed: {}: {}", failed_step(failure), to_string(failure.status),
                          hanging(failure.error, 2));
  for (const auto& cause : failure.causes) text += cause_text(cause, failure.error);
  if (failure.causes.empty()) return text;
  if (const auto todo = advice(failure.causes.back()); !todo.empty()) text += "\n  " + todo;
  return text;
}

std::string error_json(const StepResult& failure, double time_s) {
  ordered_json report{{"status", to_string(failure.status)},
                      {"step", failed_step(failure)},
                      {"attempt", failure.attempt},
                      {"error", failure.error},
                      {"time", utc(time_s)},
                      {"causes", ordered_json::array()}};
  for (const auto& cause : failure.causes) report["causes"].push_back(cause_json(cause));
  return agent::report_text(report);
}

void write_error_report(const std::filesystem::path& folder, const StepResult& failure) noexcept {
  agent::write_report(folder, error_json(failure, agent::seconds_since_1970()));
}

void remove_error_report(const std::filesystem::path& folder) noexcept { agent::remove_report(folder); }

}  // namespace accelmgr::program
