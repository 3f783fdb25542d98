// What a service tells of the spans of its processes. trace_cli_test.py reads the file that the program makes
// of them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "service_run.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

using nlohmann::json;

/// A span, with its thread.
struct Seen {
  std::string thread, activity;
  std::int64_t begin_ns, end_ns;
  int pid, rank;
  std::uint64_t step, attempt;
};

/// What a service tells, in as many answers as it takes.
class Trace {
 public:
  explicit Trace(const ServiceRun& service, const std::string& since = "") {
    position = since;
    do {
      const auto answer = service.ask("GET", "/v1/trace" + (position.empty() ? "" : "?since=" + position));
      EXPECT_EQ(answer.status, 200) << answer.body;
      if (answer.status != 200) return;
      add(answer.body);
    } while (more);
  }
  std::vector<Seen> of(const std::string& thread, const std::string& activity, int rank = -1) const {
    std::vector<Seen> found;
    std::ranges::copy_if(spans, std::back_inserter(found), [&](const Seen& span) {
      return span.thread == thread && span.activity == activity && (rank < 0 || span.rank == rank);
    });
    return found;
  }

  std::vector<Seen> spans;
  std::vector<std::uint64_t> overwritten;  ///< Of each thread.
  std::vector<std::uint64_t> told;
  std::string position;
  bool more = false;

 private:
  void add(const json& answer) {
    overwritten.resize(answer["threads"].size());
    told.resize(overwritten.size());
    for (std::size_t i = 0; i < told.size(); ++i) {
      const auto& thread = answer["threads"][i];
      overwritten[i] += thread["overwritten"].get<std::uint64_t>();
      told[i] += thread["spans"].size();
      for (const auto& span : thread["spans"])
        spans.push_back({.thread = thread["thread"],
                         .activity = span["activity"],
                         .begin_ns = span["begin_ns"],
                         .end_ns = span["end_ns"],
                         .pid = span["pid"],
                         .rank = thread.value("rank", span.value("rank", -1)),
                         .step = span.value("step", std::uint64_t{0}),
                         .attempt = span.value("attempt", std::uint64_t{0})});
    }
    position = answer["next"];
    more = answer["more"];
  }
};

/// Asks until `there`.
Trace trace_when(const ServiceRun& service, const std::function<bool(const Trace&)>& there) {
  const auto deadline = base::Deadline::in_seconds(60);
  for (;;) {
    Trace trace(service);
    if (there(trace) || deadline.passed()) return trace;
    std::this_thread::yield();
  }
}

/// Fails the test unless the spans of each thread follow or contain each other.
void expect_nested(std::vector<Seen> spans) {
  std::ranges::sort(spans, {}, [](const Seen& s) { return std::pair(s.begin_ns, -s.end_ns); });
  std::map<std::tuple<std::string, int, int>, std::vector<Seen>> open;
  for (const auto& span : spans) {
    EXPECT_LE(span.begin_ns, span.end_ns) << span.activity;
    auto& around = open[{span.thread, span.pid, span.rank}];
    while (!around.empty() && around.back().end_ns <= span.begin_ns) around.pop_back();
    EXPECT_TRUE(around.empty() || span.end_ns <= around.back().end_ns)
        << span.thread << ": " << span.activity << " overlaps " << around.back().activity;
    around.push_back(span);
  }
}

std::uint64_t steps_in(const std::vector<Seen>& spans) {
  std::set<std::uint64_t> steps;
  for (const auto& span : spans) steps.insert(span.step);
  return steps.size();
}

TEST(Trace, EveryStepHasTheSpansOfEachRankAndOfTheHost) {
  const ServiceRun service;
  const auto before = base::now_ns();
  ASSERT_EQ(service.ask("POST", "/v1/step", R"({"count": 5})").status, 200);
  // A span is there when it has ended: the last reduction ends just after the step.
  const auto trace =
      trace_when(service, [](const Trace& t) { return t.of("runner", "reduce").size() == 10; });
  const auto after = base::now_ns();
  for (int rank = 0; rank < staged_ranks; ++rank)
    for (const auto* activity : {"prepare", "data", "forward", "vote", "reduce"}) {
      const auto found = trace.of("runner", activity, rank);
      EXPECT_EQ(found.size(), 5u) << activity << " of rank " << rank;
      EXPECT_EQ(steps_in(found), 5u) << activity << " of rank " << rank;
      for (const auto& span : found) {
        EXPECT_EQ(span.attempt, span.step);
        EXPECT_GE(span.begin_ns, before);
        EXPECT_LE(span.end_ns, after);
      }
    }
  for (const auto* activity : {"step", "assemble", "attempt"}) {
    const auto found = trace.of("host", activity);
    EXPECT_EQ(found.size(), 5u) << activity;
    EXPECT_EQ(steps_in(found), 5u) << activity;
    for (const auto& span : found) EXPECT_EQ(span.pid, service.pid());
  }
  EXPECT_GE(trace.of("loader", "read").size(), 10u);
  EXPECT_EQ(trace.of("supervisor", "start_runner").size(), 2u);
  expect_nested(trace.spans);
  // What a rank computes lies within the attempt.
  for (const auto& attempt : trace.of("host", "attempt"))
    for (const auto& forward : trace.of("runner", "forward")) {
      if (forward.step != attempt.step) continue;
      EXPECT_GE(forward.begin_ns, attempt.begin_ns);
      EXPECT_LE(forward.end_ns, attempt.end_ns);
    }
}

TEST(Trace, ARunnerThatIsKilledAndItsReplacementHaveEachTheirSpans) {
  const ServiceRun service(
      [](Config& config) { config.faults = {"rank=1 step=2 phase=forward fault=kill"}; });
  const int killed = service.status()["runners"][1]["pid"];
  ASSERT_EQ(service.ask("POST", "/v1/step", R"({"count": 3})").status, 200);
  const int replacement = service.status()["runners"][1]["pid"];
  ASSERT_NE(killed, replacement);
  const Trace trace(service);
  std::map<int, std::set<std::uint64_t>> steps;  // By pid.
  for (const auto& span : trace.of("runner", "forward", 1)) steps[span.pid].insert(span.step);
  EXPECT_EQ(steps, (std::map<int, std::set<std::uint64_t>>{{killed, {1}}, {replacement, {2, 3}}}));
  // What it did before it died is there, too.
  const auto data = trace.of("runner", "data", 1);
  EXPECT_TRUE(std::ranges::any_of(data, [&](const Seen& s) { return s.pid == killed && s.step == 2; }));
  const auto recovered = trace.of("supervisor", "recover", 1);
  ASSERT_EQ(recovered.size(), 1u);
  EXPECT_EQ(recovered[0].step, 2u);
  // The host has tried step 2 twice, within one call.
  const auto attempts = trace.of("host", "attempt");
  EXPECT_EQ(std::ranges::count_if(attempts, [](const Seen& s) { return s.step == 2; }), 2);
  expect_nested(trace.spans);
}

TEST(Trace, APollerGetsWhatIsNew) {
  const ServiceRun service;
  ASSERT_EQ(service.ask("POST", "/v1/step", R"({"count": 2})").status, 200);
  const Trace first(service);
  EXPECT_EQ(steps_in(first.of("runner", "forward")), 2u);
  const Trace now(service, "now");
  EXPECT_EQ(now.spans.size(), 0u);
  ASSERT_EQ(service.ask("POST", "/v1/step").status, 200);
  for (const auto& since : {first.position, now.position}) {
    const Trace next(service, since);
    const auto forward = next.of("runner", "forward");
    EXPECT_EQ(forward.size(), 2u);
    for (const auto& span : forward) EXPECT_EQ(span.step, 3u);
    EXPECT_EQ(next.of("host", "step").size(), 1u);
  }
  // A position of an earlier service, which has come further.
  const Trace again(service, "9999999.9999999.9999999.9999999.9999999.9999999");
  EXPECT_EQ(steps_in(again.of("runner", "forward")), 3u);
}

TEST(Trace, SpansThatAreWrittenOverAreCounted) {
  const ServiceRun service;
  const Trace before(service, "now");
  ASSERT_EQ(service.ask("POST", "/v1/step", R"({"count": 500})").status, 200);
  const Trace after(service, before.position);
  const auto numbers = [](const std::string& position) {
    std::vector<std::uint64_t> out;
    std::istringstream text(position);
    for (std::string number; std::getline(text, number, '.');) out.push_back(std::stoull(number));
    return out;
  };
  const auto from = numbers(before.position), to = numbers(after.position);
  ASSERT_EQ(after.told.size(), 6u);  // Two runners, host, supervisor, loader, checkpoint writer.
  for (std::size_t i = 0; i < to.size(); ++i)
    EXPECT_EQ(after.told[i] + after.overwritten[i], to[i] - from[i]) << "thread " << i;
  EXPECT_GT(after.overwritten[0], 0u);
  EXPECT_GT(after.told[0], 1500u);
  expect_nested(after.spans);
  // Without a position, a client has missed nothing.
  EXPECT_EQ(Trace(service).overwritten, std::vector<std::uint64_t>(6));
}

TEST(Trace, AHostHasItsSpansUnderItsOwnPid) {
  const TemporaryFolder folder;
  const ServiceRun service([&](Config& config) { config.checkpoint.directory = folder / "checkpoints"; });
  auto manager = service.attach();
  manager.zero_grad();
  expect_ok(manager);
  manager.begin_writing();
  manager.end_writing();
  manager.save_checkpoint({});
  ASSERT_EQ(manager.checkpoints_written(60).size(), 1u);
  const Trace trace(service);
  std::string order;
  for (const auto& span : trace.spans) {
    if (span.thread != "host") continue;
    EXPECT_EQ(span.pid, getpid());
    order += span.activity + " ";
  }
  EXPECT_EQ(order, "zero_grad assemble attempt step write_parameters copy_checkpoint ");
  const auto written = trace.of("checkpoint_writer", "write_checkpoint");
  ASSERT_EQ(written.size(), 1u);
  EXPECT_EQ(written[0].step, 1u);
  EXPECT_EQ(written[0].pid, service.pid());
  expect_nested(trace.spans);
}

}  // namespace
}  // namespace accelmgr::test
