#include "launcher/agent/failure_summary.hpp"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>

#include "base/ipc/process.hpp"
#include "base/utf8.hpp"
#include "launcher/agent/report_file.hpp"

namespace accelmgr::agent {
namespace {

using nlohmann::ordered_json;

constexpr int exit_unknown = 1;
constexpr std::size_t longest_what_bytes = 4096;  // Bounds, because an error file may have any size.
constexpr std::size_t longest_trace_bytes = 16384;

/// The beginning of `text`.
std::string head(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return base::valid_utf8(text);
  return base::valid_utf8(text.substr(0, bytes)) + "...";
}

/// The end of `text`. The end of a trace shows where the error was raised.
std::string tail(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return base::valid_utf8(text);
  return "..." + base::valid_utf8(text.substr(text.size() - bytes));
}

std::string text_at(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

std::string who(const Failure& failure) {
  if (failure.rank < 0) return fmt::format("the agent of node {} ({})", failure.node_rank, failure.hostname);
  return fmt::format("rank {} (local rank {} of node {}, {}, pid {})", failure.rank, failure.local_rank,
                     failure.node_rank, failure.hostname, failure.pid);
}

std::string details(const Failure& failure, int indent) {
  const std::string margin(static_cast<std::size_t>(indent), ' ');
  std::string text;
  if (!failure.what.empty()) text += "\n" + margin + hanging(failure.what, indent);
  if (!failure.trace.empty()) text += "\n" + margin + "  " + hanging(failure.trace, indent + 2);
  if (failure.what.empty() && !failure.log.empty()) {
    text += "\n" + margin + "the end of its standard error:";
    for (const auto& line : failure.log) text += "\n" + margin + "  " + hanging(line, indent + 2);
  }
  if (!failure.log_folder.empty()) text += "\n" + margin + "its output: " + failure.log_folder;
  return text;
}

std::string plural(int count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "es");
}

ordered_json readable(const Failure& failure) {
  ordered_json object(to_json(failure));
  object.erase("time_s");
  object["time"] = utc(failure.time_s);
  return object;
}

}  // namespace

nlohmann::json to_json(const Failure& failure) {
  return {{"rank", failure.rank},
          {"local_rank", failure.local_rank},
          {"node_rank", failure.node_rank},
          {"hostname", failure.hostname},
          {"pid", failure.pid},
          {"time_s", failure.time_s},
          {"exit_code", failure.exit_code},
          {"signal", failure.signal},
          {"what", failure.what},
          {"trace", failure.trace},
          {"log", failure.log_folder},
          {"last_lines", failure.log}};
}

Failure failure_from(const nlohmann::json& json) {
  Failure failure;
  failure.time_s = json.at("time_s");
  failure.rank = json.at("rank");
  failure.pid = json.at("pid");
  const int code = json.at("exit_code"), signal = json.at("signal");
  ipc::set_exit(failure, signal != 0 ? signal : W_EXITCODE(code, 0));
  failure.what = json.at("what");
  failure.trace = json.at("trace");
  failure.log = json.at("last_lines");
  failure.local_rank = json.at("local_rank");
  failure.node_rank = json.at("node_rank");
  failure.hostname = json.at("hostname");
  failure.log_folder = json.at("log");
  return failure;
}

int exit_code_of(const Failure& failure) noexcept {
  if (failure.signal != 0) return 128 + failure.signal;
  return failure.exit_code != 0 ? failure.exit_code : exit_unknown;
}

void take_error_file(std::string_view content, Failure& failure) {
  if (content.find_first_not_of(" \n\r\t") == std::string_view::npos) return;
  const auto object = nlohmann::json::parse(content, nullptr, false);
  if (!object.is_object() || !object.contains("message")) {
    failure.what = head(content, longest_what_bytes);
    return;
  }
  const auto& message = object["message"];
  if (message.is_object()) {
    failure.what = head(text_at(message, "message"), longest_what_bytes);
    const auto extra = message.find("extraInfo");
    if (extra != message.end() && extra->is_object())
      failure.trace = tail(text_at(*extra, "py_callstack"), longest_trace_bytes);
  } else {
    failure.what = head(text_at(object, "message"), longest_what_bytes);
  }
}

std::string summary_text(const FailureSummary& summary) {
  const auto& first = summary.first;
  std::string text = first.rank < 0 ? "accelmgr: the launch failed:"
                                    : fmt::format("accelmgr: rank {} failed: {}", first.rank, first.exit);
  text += fmt::format("\n  {} {}", utc(first.time_s), who(first));
  if (summary.max_restarts > 0)
    text += fmt::format(", after {} of at most {} restarts", summary.attempt, summary.max_restarts);
  text += details(first, 4);
  if (!summary.later.empty()) text += "\n  later failures:";
  for (const auto& failure : summary.later)
    text += fmt::format("\n    {} {}: {}", utc(failure.time_s), who(failure), failure.exit) +
            (failure.what.empty() ? "" : ": " + hanging(failure.what, 6));
  if (summary.ended > 0) text += fmt::format("\n  {} ended because of it", plural(summary.ended, "process"));
  if (!summary.report.empty()) text += "\n  report: " + summary.report;
  return text;
}

std::string summary_json(const FailureSummary& summary) {
  ordered_json report{{"status", "failed"},
                      {"exit_code", exit_code_of(summary.first)},
                      {"time", utc(summary.first.time_s)},
                      {"attempt", summary.attempt},
                      {"max_restarts", summary.max_restarts},
                      {"ended", summary.ended},
                      {"first", readable(summary.first)},
                      {"later", ordered_json::array()}};
  for (const auto& failure : summary.later) report["later"].push_back(readable(failure));
  return report_text(report);
}

}  // namespace accelmgr::agent
