#include "trace_file.hpp"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>

#include "accelmgr/errors.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 5> thread_names{"host", "supervisor", "loader", "checkpoint_writer",
                                                       "runner"};
/// Threads of the supervisor's work for a rank have this number and those behind it.
constexpr int first_tid_of_ranks = 10;

std::int64_t eighths(std::int64_t ns) { return ns / 125; }
std::string microseconds(std::int64_t eighths) {
  return fmt::format("{}.{:03}", eighths / 8, eighths % 8 * 125);
}

}  // namespace

void TraceFile::add(const json& answer) {
  try {
    for (const auto& thread : answer.at("threads")) {
      const auto found = std::ranges::find(thread_names, thread.at("thread").get<std::string>());
      if (found == thread_names.end()) throw SessionError("a service tells of a thread that is not known");
      overwritten_ += thread.at("overwritten").get<std::uint64_t>();
      for (const auto& span : thread.at("spans"))
        spans_.push_back({.begin_ns = span.at("begin_ns"),
                          .end_ns = span.at("end_ns"),
                          .step = span.value("step", std::uint64_t{0}),
                          .attempt = span.value("attempt", std::uint64_t{0}),
                          .pid = span.at("pid"),
                          .thread = static_cast<Thread>(found - thread_names.begin()),
                          .rank = thread.value("rank", span.value("rank", -1)),
                          .activity = span.at("activity")});
    }
  } catch (const json::exception& error) {
    throw SessionError(fmt::format("what a service tells of its spans cannot be read: {}", error.what()));
  }
}

std::size_t TraceFile::processes() const {
  std::set<std::int32_t> pids;
  for (const auto& span : spans_) pids.insert(span.pid);
  return pids.size();
}

// Starts of runners may overlap those of other ranks: each rank has a track for them.
TraceFile::Track TraceFile::track_of(const Span& span) {
  if (span.thread == Thread::supervisor && span.rank >= 0) return {span.pid, first_tid_of_ranks + span.rank};
  return {span.pid, span.thread == Thread::runner ? 1 : 1 + static_cast<int>(span.thread)};
}

std::string TraceFile::name_of(const Span& span) {
  switch (span.thread) {
    case Thread::host:
      return "steps";
    case Thread::supervisor:
      return span.rank < 0 ? "supervisor" : fmt::format("starts of runner {}", span.rank);
    case Thread::loader:
      return "loader";
    case Thread::checkpoint_writer:
      return "checkpoints";
    case Thread::runner:
      break;
  }
  return fmt::format("runner {}", span.rank);
}

void TraceFile::write_names(std::ostream& file) const {
  struct Process {
    std::string name;
    int place;
  };
  std::map<std::int32_t, Process> processes;
  std::map<Track, std::string> threads;
  for (const auto& span : spans_) {
    threads.emplace(track_of(span), name_of(span));
    // A service that makes a step itself has the host's thread in the manager's process.
    if (span.thread == Thread::host)
      processes.emplace(span.pid, Process{"host", 0});
    else if (span.thread == Thread::runner)
      processes[span.pid] = {name_of(span), 2 + span.rank};
    else
      processes[span.pid] = {"manager", 1};
  }
  const auto name = [&](const char* what, Track track, const std::string& key, const std::string& value) {
    fmt::print(file,
               R"({{"name":"{}","ph":"M","pid":{},"tid":{},"args":{{"{}":{}}}}},)"
               "\n",
               what, track.pid, track.tid, key, value);
  };
  for (const auto& [pid, process] : processes) {
    name("process_name", {pid, 0}, "name", fmt::format("\"{}\"", process.name));
    name("process_sort_index", {pid, 0}, "sort_index", std::to_string(process.place));
  }
  for (const auto& [track, thread] : threads) {
    name("thread_name", track, "name", fmt::format("\"{}\"", thread));
    name("thread_sort_index", track, "sort_index", std::to_string(track.tid));
  }
}

void TraceFile::write(std::ostream& file) const {
  file << R"({"displayTimeUnit":"ms","otherData":{"clock":"CLOCK_MONOTONIC","overwritten_spans":)"
       << overwritten_ << "},\"traceEvents\":[\n";
  write_names(file);
  auto sorted = spans_;
  // A span comes before those that are within it.
  std::ranges::stable_sort(sorted, {}, [](const Span& span) {
    return std::tuple(eighths(span.begin_ns), -eighths(span.end_ns), -span.end_ns);
  });
  const char* comma = "";
  for (const auto& span : sorted) {
    const auto [pid, tid] = track_of(span);
    const auto begin = eighths(span.begin_ns);
    std::string args;
    const auto add = [&](const char* key, auto value) {
      args += fmt::format("{}\"{}\":{}", args.empty() ? "" : ",", key, value);
    };
    if (span.step != 0) add("step", span.step);
    if (span.attempt != 0) add("attempt", span.attempt);
    if (span.rank >= 0) add("rank", span.rank);
    fmt::print(file,
               R"({}{{"name":"{}","cat":"{}","ph":"X","ts":{},"dur":{},"pid":{},"tid":{},"args":{{{}}}}})",
               comma, span.activity, thread_names[static_cast<std::size_t>(span.thread)], microseconds(begin),
               microseconds(eighths(span.end_ns) - begin), pid, tid, args);
    comma = ",\n";
  }
  file << "\n]}\n";
}

}  // namespace accelmgr::program
