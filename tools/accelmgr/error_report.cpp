#include "error_report.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "base/utf8.hpp"

namespace accelmgr::program {
namespace {

using json = nlohmann::ordered_json;

std::string utc(double time_s) {
  const std::int64_t ms = std::llround(time_s * 1e3);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(static_cast<std::time_t>(ms / 1000)),
                     ms % 1000);
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Counted from 1.
std::uint64_t failed_step(const StepResult& failure) {
  return failure.counted ? failure.step : failure.step + 1;
}

/// `text`, with what follows its first line indented by `spaces`.
std::string hanging(std::string_view text, int spaces) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  std::string out;
  for (const char c : base::valid_utf8(text)) {
    out += c;
    if (c == '\n') out.append(static_cast<std::size_t>(spaces), ' ');
  }
  return out;
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

std::filesystem::path report_of(const std::filesystem::path& folder) { return folder / "error.json"; }

/// The name it has until it is whole.
std::filesystem::path unfinished(const std::filesystem::path& file) { return file.string() + ".tmp"; }

void check(bool succeeded, std::string_view call, const std::filesystem::path& object) {
  if (succeeded) return;
  const int code = errno;
  throw SystemError(fmt::format("{} {}", call, object.string()), code);
}

void write_durably(const std::filesystem::path& file, std::string_view text) {
  const base::UniqueFd fd(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  check(static_cast<bool>(fd), "opening", file);
  while (!text.empty()) {
    const auto written = write(fd.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    check(written >= 0, "writing", file);
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  check(fsync(fd.get()) == 0, "syncing", file);
}

/// Its entries are as they are seen now, after a loss of power too.
void sync_folder(const std::filesystem::path& folder) {
  const auto name = folder.empty() ? std::filesystem::path(".") : folder;
  const base::UniqueFd fd(open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  check(fd && fsync(fd.get()) == 0, "syncing", name);
}

void warn(const std::exception& problem, std::string_view consequence) noexcept {
  std::fprintf(stderr, "accelmgr: warning: %s; %s\n", problem.what(), consequence.data());
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
  return report.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

void write_error_report(const std::filesystem::path& folder, const StepResult& failure) noexcept {
  try {
    const auto file = report_of(folder), temporary = unfinished(file);
    try {
      write_durably(temporary, error_json(failure, seconds_since_1970()));
      check(rename(temporary.c_str(), file.c_str()) == 0, "renaming", temporary);
    } catch (const std::exception&) {
      unlink(temporary.c_str());
      throw;
    }
    sync_folder(folder);
  } catch (const std::exception& problem) {
    warn(problem, "the failure may stand on standard error alone");
  }
}

void remove_error_report(const std::filesystem::path& folder) noexcept {
  try {
    for (const auto& file : {report_of(folder), unfinished(report_of(folder))})
      check(unlink(file.c_str()) == 0 || errno == ENOENT || errno == ENOTDIR, "removing", file);
  } catch (const std::exception& problem) {
    warn(problem, "what it says is of an earlier run");
  }
}

}  // namespace accelmgr::program
