#include "error_report.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "report_file.hpp"

namespace accelmgr::program {
namespace {

using json = nlohmann::ordered_json;

/// Counted from 1.
std::uint64_t failed_step(const StepResult& failure) {
  return failure.counted ? failure.step : failure.step + 1;
}

std::string cause_text(const FailureCause& cause, const std::string& headline) {
  const auto who = cause.rank < 0 ? "manager or launcher" : fmt::format("rank {}", cause.rank);
  const auto phase = cause.phase.empty() ? "" : fmt::format(" phase {},", cause.phase);
  auto text = fmt::format("\n  {} {},{} step {}, pid {}: {}", utc(cause.time_s), who, phase, cause.step,
                          cause.pid, cause.exit);
  if (headline.find(cause.what) == std::string::npos)
    text += (cause.exit.empty() ? "" : ": ") + hanging(cause.what, 4);
  for (const auto& line : cause.log) text += "\n      " + hanging(line, 6);
  return text;
}

json cause_json(const FailureCause& cause) {
  return {{"time", utc(cause.time_s)}, {"rank", cause.rank}, {"pid", cause.pid},
          {"phase", cause.phase},      {"step", cause.step}, {"attempt", cause.attempt},
          {"exit", cause.exit},        {"what", cause.what}, {"log", cause.log}};
}

}  // namespace

std::string failure_text(const StepResult& failure) {
  auto text = fmt::format("step {} failed: {}: {}", failed_step(failure), to_string(failure.status),
                          hanging(failure.error, 2));
  for (const auto& cause : failure.causes) text += cause_text(cause, failure.error);
  return text;
}

std::string error_json(const StepResult& failure, double time_s) {
  json report{{"status", to_string(failure.status)},
              {"step", failed_step(failure)},
              {"attempt", failure.attempt},
              {"error", failure.error},
              {"time", utc(time_s)},
              {"causes", json::array()}};
  for (const auto& cause : failure.causes) report["causes"].push_back(cause_json(cause));
  return report_text(report);
}

void write_error_report(const std::filesystem::path& folder, const StepResult& failure) noexcept {
  write_report(folder, error_json(failure, seconds_since_1970()));
}

void remove_error_report(const std::filesystem::path& folder) noexcept { remove_report(folder); }

}  // namespace accelmgr::program
