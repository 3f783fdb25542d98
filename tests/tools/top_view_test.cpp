#include "top_view.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace accelmgr::program {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json status(const std::string& model = "gpt") {
  return {{"model", model},
          {"data", "text"},
          {"run_id", "15f2"},
          {"uptime_s", 8.2},
          {"ready", true},
          {"why_not_ready", nullptr},
          {"host", {{"name", "train.py"}, {"pid", 7}, {"lease", 2}, {"leaving", false}}},
          {"steps", 3},
          {"attempts", 4},
          {"samples", 24},
          {"losses", 1},
          {"replacements", 1},
          {"runners", json::array({{{"rank", 0},
                                    {"state", "ready"},
                                    {"phase", "waiting"},
                                    {"pid", 9},
                                    {"queued_batches", 3},
                                    {"queue_slots", 8},
                                    {"silent_s", 0.25},
                                    {"samples", 12}}})}};
}

json step(double time_s, double loss, bool counted = true) {
  return {{"time_s", time_s},   {"loss", std::isnan(loss) ? json() : json(loss)},
          {"counted", counted}, {"samples", 8},
          {"compute_ms", 9},    {"reduce_ms", 0.5},
          {"wait_ms", 0.5}};
}

json steps(const std::vector<json>& all, int next) { return {{"steps", all}, {"next", next}}; }

std::string text_of(const TopView& view, std::size_t width = 100) {
  std::string text;
  for (const auto& line : view.lines(width)) text += line + "\n";
  return text;
}

TEST(Sparkline, GoesFromTheSmallestToTheLargestValue) {
  EXPECT_EQ(sparkline({1, 2, 3, 8, NAN, 1}), "▁▂▃█ ▁");
  EXPECT_EQ(sparkline({5, 5}), "▁▁");
  EXPECT_EQ(sparkline({}), "");
  EXPECT_EQ(sparkline({NAN, INFINITY}), "  ");
}

TEST(TopView, ShowsTheServiceItsHostAndItsRunners) {
  TopView view;
  view.take(status(), steps({step(1, 4), step(2, 2), step(3, 1), step(3.5, 9, false)}, 4));
  const auto text = text_of(view);
  EXPECT_THAT(text, HasSubstr("model 'gpt' on data 'text', run 15f2, up 8 s: ready"));
  EXPECT_THAT(text, HasSubstr("train.py (pid 7), lease 2"));
  EXPECT_THAT(text, HasSubstr("3 of 4 attempts, 24 samples, 1 processes lost, 1 replaced"));
  EXPECT_THAT(text, HasSubstr("1 steps/s, 8 samples/s over the last 3 steps"));
  EXPECT_THAT(text, HasSubstr("10.00 ms a step: 90% compute, 5% reduce, 5% wait"));
  EXPECT_THAT(text, HasSubstr("loss      1         █▃▁"));
  EXPECT_THAT(text, HasSubstr("0      ready     waiting          9       3/8    0.2 s           12"));
  EXPECT_EQ(view.since(), 4u);
}

TEST(TopView, StepsAddUp) {
  TopView view;
  for (int i = 0; i < 600; ++i) view.take(status(), steps({step(i / 2000., 600 - i)}, i + 1));
  EXPECT_THAT(text_of(view), HasSubstr("2000 steps/s, 16000 samples/s over the last 256 steps"));
  EXPECT_EQ(view.since(), 600u);
}

TEST(TopView, WithoutAStepNothingIsMadeUp) {
  TopView view;
  view.take(status(), steps({}, 0));
  EXPECT_THAT(text_of(view), HasSubstr("speed     -\ntime      -\nloss      -\n"));
  view.take(status(), steps({step(1, NAN)}, 1));
  EXPECT_THAT(text_of(view), HasSubstr("loss      nan"));
}

// No text of a user moves the cursor, and no line is wider than the terminal.
TEST(TopView, LinesFitAndHoldNoControlCharacters) {
  TopView view;
  view.take(status("\x1b[2J\n\r" + std::string(300, 'x')), steps({step(1, 4), step(2, 2)}, 2));
  for (const auto width : {40u, 80u, 200u})
    for (const auto& line : view.lines(width)) {
      const auto columns = std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
      EXPECT_LE(columns, static_cast<long>(width)) << line;
      EXPECT_TRUE(std::ranges::none_of(line, [](char c) { return c >= 0 && c < 0x20; })) << line;
    }
}

}  // namespace
}  // namespace accelmgr::program
