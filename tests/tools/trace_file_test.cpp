// The file that `accelmgr trace` makes of what a service tells.
#include "trace_file.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::json;

json written(const TraceFile& trace) {
  std::ostringstream file;
  trace.write(file);
  return json::parse(file.str());
}

json thread(const char* name, const char* spans, int rank = -1) {
  json out{{"thread", name}, {"overwritten", 0}, {"spans", json::parse(spans)}};
  if (rank >= 0) out["rank"] = rank;
  return out;
}

json answer(const std::vector<json>& threads) {
  return {{"threads", threads}, {"next", "1"}, {"more", false}};
}

json events(const TraceFile& trace, const char* phase) {
  json found = json::array();
  const auto file = written(trace);
  for (const auto& event : file["traceEvents"])
    if (event["ph"] == phase) found.push_back(event);
  return found;
}

/// {"process_name 7": "manager", "thread_name 7 2": ...}
json names(const TraceFile& trace) {
  json found;
  const auto given = events(trace, "M");
  for (const auto& event : given) {
    auto key = event["name"].get<std::string>() + " " + event["pid"].dump();
    if (event["tid"] != 0) key += " " + event["tid"].dump();
    found[key] = *event["args"].begin();
  }
  return found;
}

TEST(TraceFile, ASpanIsACompleteEventInMicroseconds) {
  TraceFile trace;
  trace.add(answer({thread("runner", R"([{"begin_ns": 5000250, "end_ns": 5002000, "activity": "forward",
                                          "pid": 7, "step": 3, "attempt": 4}])",
                           1)}));
  EXPECT_EQ(events(trace, "X"), json::parse(R"([{"name": "forward", "cat": "runner", "ph": "X",
      "ts": 5000.25, "dur": 1.75, "pid": 7, "tid": 1, "args": {"step": 3, "attempt": 4, "rank": 1}}])"));
  EXPECT_EQ(trace.spans(), 1u);
  EXPECT_EQ(trace.processes(), 1u);
}

TEST(TraceFile, ProcessesAndThreadsHaveNames) {
  constexpr auto one = R"([{"begin_ns": 1000, "end_ns": 2000, "activity": "x", "pid": 7}])";
  constexpr auto start =
      R"([{"begin_ns": 1000, "end_ns": 2000, "activity": "start_runner", "pid": 7, "rank": 2}])";
  constexpr auto other = R"([{"begin_ns": 1000, "end_ns": 2000, "activity": "x", "pid": 8}])";
  constexpr auto two = R"([{"begin_ns": 1000, "end_ns": 2000, "activity": "x", "pid": 9},
                           {"begin_ns": 3000, "end_ns": 4000, "activity": "x", "pid": 10}])";
  TraceFile trace;
  trace.add(answer({thread("host", other), thread("supervisor", start), thread("loader", one),
                    thread("checkpoint_writer", one), thread("runner", two, 0)}));
  const auto found = names(trace);
  const auto expected = json::parse(R"({
           "process_name 8": "host", "process_name 7": "manager", "process_name 9": "runner 0",
           "process_name 10": "runner 0", "thread_name 8 1": "steps", "thread_name 7 12": "starts of runner 2",
           "thread_name 7 3": "loader", "thread_name 7 4": "checkpoints", "thread_name 9 1": "runner 0"})");
  for (const auto& [key, value] : expected.items())
    EXPECT_EQ(found.value(key, json()), value) << key << " in " << found;
}

TEST(TraceFile, AServiceThatMakesStepsItselfIsAManager) {
  constexpr auto one = R"([{"begin_ns": 1000, "end_ns": 2000, "activity": "x", "pid": 7}])";
  TraceFile trace;
  trace.add(answer({thread("loader", one), thread("host", one)}));
  EXPECT_EQ(names(trace)["process_name 7"], "manager");
  EXPECT_EQ(names(trace)["thread_name 7 1"], "steps");
}

// Nanoseconds have no exact place in a double of microseconds: readers would find spans that overlap.
TEST(TraceFile, SpansThatTouchOrNestStillDoInDoubles) {
  TraceFile trace;
  json spans = json::array();
  constexpr std::int64_t first = 17'039'536'529'013;  // ns
  for (std::int64_t i = 0; i < 1000; ++i)
    spans.push_back(
        {{"begin_ns", first + i * 1237}, {"end_ns", first + (i + 1) * 1237}, {"activity", "x"}, {"pid", 7}});
  trace.add(answer({thread("loader", spans.dump().c_str())}));
  const auto found = events(trace, "X");
  for (std::size_t i = 1; i < found.size(); ++i) {
    const double end = found[i - 1]["ts"].get<double>() + found[i - 1]["dur"].get<double>();
    ASSERT_EQ(end, found[i]["ts"].get<double>()) << i;
    ASSERT_EQ(end * 8, std::floor(end * 8)) << i;
  }
}

TEST(TraceFile, ASpanComesBeforeThoseThatBeginWithIt) {
  TraceFile trace;
  trace.add(answer({thread("host", R"([
      {"begin_ns": 1010, "end_ns": 1200, "activity": "assemble", "pid": 7},
      {"begin_ns": 1200, "end_ns": 4040, "activity": "attempt", "pid": 7},
      {"begin_ns": 1000, "end_ns": 4050, "activity": "step", "pid": 7}])")}));
  std::string order;
  for (const auto& event : events(trace, "X")) order += event["name"].get<std::string>() + " ";
  EXPECT_EQ(order, "step assemble attempt ");
}

TEST(TraceFile, SpansThatWereWrittenOverAreCounted) {
  TraceFile trace;
  auto one = thread("loader", "[]");
  one["overwritten"] = 3;
  trace.add(answer({one}));
  trace.add(answer({one}));
  EXPECT_EQ(trace.overwritten(), 6u);
  EXPECT_EQ(written(trace)["otherData"]["overwritten_spans"], 6);
  EXPECT_EQ(events(trace, "X"), json::array());
}

TEST(TraceFile, WhatIsNoAnswerIsRefused) {
  TraceFile trace;
  for (const auto* text : {"null", "[]", "{}", R"({"threads": 1})", R"({"threads": [{"thread": "x"}]})",
                           R"({"threads": [{"thread": "loader", "overwritten": 0, "spans": [{}]}]})"})
    EXPECT_THROW(trace.add(json::parse(text)), SessionError) << text;
}

}  // namespace
}  // namespace accelmgr::program
