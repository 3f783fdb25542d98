// Measures what the spans that are always recorded cost a runner and a host in a step: a look at the clock
// and the writing of a span for each of its activities. `warm` writes one step after the other. `cold` first
// reads more than the caches hold, as a model does.
#include <cstdint>
#include <vector>

#include "base/clock.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;
using session::Activity;

constexpr std::size_t larger_than_caches = std::size_t{256} << 20;

/// What a runner does in a step of one micro-batch.
constexpr Activity of_runner[] = {Activity::waiting,     Activity::prepare,  Activity::data,
                                  Activity::forward,     Activity::backward, Activity::vote,
                                  Activity::other_votes, Activity::reduce};

void runner_step(session::ActivityWriter& activities, std::uint64_t step) {
  activities.set_attempt(step, step);
  for (const auto activity : of_runner) activities.enter(activity, base::now_ns());
}

/// As Stepper::step(), which looks at the clock without spans, too.
void host_step(const session::SpanWriter& spans, std::uint64_t step) {
  const session::SpanScope whole(spans, Activity::step, step);
  { const session::SpanScope assemble(spans, Activity::assemble, step); }
  { const session::SpanScope attempt(spans, Activity::attempt, step); }
}

template <class Step>
double median_us(int steps, bool cold, std::vector<std::uint64_t>& memory, Step&& make_step) {
  std::vector<double> us;
  std::uint64_t sum = 0;
  for (int i = 0; i < steps; ++i) {
    if (cold)
      for (std::size_t word = 0; word < memory.size(); word += 8) sum += memory[word]++;
    const auto begin = base::now_ns();
    make_step(static_cast<std::uint64_t>(i));
    us.push_back(double(base::now_ns() - begin) / 1e3);
  }
  memory[0] += sum;  // So that the reads are made.
  return bench::median(std::move(us));
}

void measure(bool quick) {
  auto session =
      session::Session::create({.ranks = 2, .bytes = {.parameters = 64}, .manifest_bytes = 64}, 2, 1);
  std::vector<std::uint64_t> memory(larger_than_caches / sizeof(std::uint64_t));
  session::ActivityWriter activities(session::RunnerView(session, 0).spans());
  const session::SpanWriter spans(session::HostView(session).spans());
  for (const bool cold : {false, true}) {
    const int steps = (cold ? 40 : 100'000) / (quick ? 10 : 1);
    const auto in_case = cold ? "cold" : "warm";
    bench::emit("ours", in_case, "runner",
                median_us(steps, cold, memory, [&](std::uint64_t step) { runner_step(activities, step); }),
                "us");
    bench::emit("ours", in_case, "host",
                median_us(steps, cold, memory, [&](std::uint64_t step) { host_step(spans, step); }), "us");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { measure(quick); });
}
