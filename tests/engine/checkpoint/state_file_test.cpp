#include "engine/checkpoint/state_file.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "engine/checkpoint/checksum.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

State sample_state() {
  return {.step = 123,
          .metric = 0.1,
          .model = {456, "xxh3-128:m"},
          .training = {789, "xxh3-128:t"},
          .run = {{"seed", 18446744073709551615u},
                  {"loss", 1.0 / 3},
                  {"text", "\u00e4\n\"\\"},
                  {"list", {1, -2, 3.0}}}};
}

std::string refusal(const std::string& text) {
  return message_of<CheckpointError>([&] { parse_state(text, "state.json"); });
}

/// The text of a state file that holds `state` and its right checksum.
std::string sealed(const json& state) {
  const auto text = state.dump();
  return json{{"checksum", checksum_of(std::as_bytes(std::span(text)))}, {"state", state}}.dump(1) + "\n";
}

json state_of(const std::string& text) { return json::parse(text)["state"]; }

TEST(StateFile, GivesBackWhatWasWritten) {
  const auto state = sample_state();
  const auto read = parse_state(print_state(state), "state.json");
  EXPECT_EQ(read.step, state.step);
  EXPECT_EQ(read.metric, state.metric);
  EXPECT_EQ(read.model.bytes, 456u);
  EXPECT_EQ(read.model.checksum, "xxh3-128:m");
  EXPECT_EQ(read.training.bytes, 789u);
  EXPECT_EQ(read.training.checksum, "xxh3-128:t");
  EXPECT_EQ(read.run, state.run);
}

TEST(StateFile, WhatIsNestedTooDeepIsRefusedBeforeTheStackEnds) {
  constexpr std::size_t levels = 1'000'000;
  const auto deep = std::string(levels, '[') + std::string(levels, ']');
  EXPECT_EQ(refusal(R"({"checksum": "xxh3-128:x", "state": {"run": )" + deep + "}}"),
            "'state.json' is nested deeper than 256 levels");
  auto state = sample_state();
  for (int level = 0; level < 250; ++level) state.run = {{"of", state.run}};
  EXPECT_EQ(parse_state(print_state(state), "state.json").run, state.run);
  for (int level = 0; level < 10; ++level) state.run = {{"of", state.run}};
  EXPECT_EQ(message_of<CheckpointError>([&] { print_state(state); }),
            "the state of a checkpoint is nested deeper than 254 levels");
}

TEST(StateFile, AMetricThatIsNotFiniteIsNone) {
  auto state = sample_state();
  for (const std::optional<double> metric : {std::optional<double>(), std::optional(std::nan("")),
                                             std::optional(-std::numeric_limits<double>::infinity())}) {
    state.metric = metric;
    EXPECT_EQ(parse_state(print_state(state), "state.json").metric, std::nullopt);
  }
}

TEST(StateFile, RefusesToWriteWhatWouldComeBackAsSomethingElse) {
  const auto refusal_of = [](json run) {
    auto state = sample_state();
    state.run = std::move(run);
    return message_of<CheckpointError>([&] { print_state(state); });
  };
  EXPECT_THAT(refusal_of({{"a", {{"b", std::nan("")}}}}),
              HasSubstr("/a/b would not be the same when read back"));
  EXPECT_THAT(refusal_of({{"bytes", json::binary({1, 2})}}), HasSubstr("/bytes would not be"));
  EXPECT_THAT(refusal_of({{"text", "\xff"}}), HasSubstr("UTF-8"));
  EXPECT_THAT(refusal_of(json::array({1})), HasSubstr("must be a JSON object, not array"));
  EXPECT_THAT(refusal_of({{"text", std::string(17u << 20, 'x')}}), HasSubstr("at most 16777216 are allowed"));
}

TEST(StateFile, EveryFlippedByteIsRefused) {
  const auto text = print_state(sample_state());
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (const int flip : {1, 3, 32, 128}) {
      auto flipped = text;
      flipped[at] = static_cast<char>(flipped[at] ^ flip);
      EXPECT_THROW(parse_state(flipped, "state.json"), CheckpointError) << at << ", " << flip;
    }
  }
}

TEST(StateFile, EveryTornTextIsRefused) {
  const auto text = print_state(sample_state());
  EXPECT_THAT(refusal(""), HasSubstr("'state.json' is torn: it is empty"));
  for (std::size_t length = 1; length + 2 < text.size(); ++length)
    EXPECT_THAT(refusal(text.substr(0, length)), HasSubstr("is torn: its JSON is not complete")) << length;
  EXPECT_THAT(refusal(text.substr(0, text.size() - 1)), HasSubstr("is damaged"));
}

TEST(StateFile, AWrongChecksumIsSaid) {
  auto text = print_state(sample_state());
  text.replace(text.find("123"), 3, "124");
  EXPECT_THAT(refusal(text), HasSubstr("is not that of its content"));
}

TEST(StateFile, ANewerVersionIsSaidWithBothNumbers) {
  auto state = state_of(print_state(sample_state()));
  state["version"] = 7;
  constexpr const char* expected = "is of the newer format version 7; this program knows versions up to 1";
  EXPECT_THAT(refusal(sealed(state)), HasSubstr(expected));
  // Also if the kind of checksum is unknown.
  EXPECT_THAT(refusal(json{{"checksum", "sha3:12"}, {"state", state}}.dump()), HasSubstr(expected));
  state["version"] = 1;
  EXPECT_THAT(refusal(json{{"checksum", "sha3:12"}, {"state", state}}.dump()),
              HasSubstr("is damaged or was not written by accelmgr"));
  for (const auto& wrong : {json(0), json(-1), json("1"), json()}) {
    state["version"] = wrong;
    EXPECT_THAT(refusal(sealed(state)), HasSubstr("is damaged or was not written by accelmgr"));
  }
}

TEST(StateFile, WhatIsNotOursIsRefused) {
  EXPECT_THAT(refusal("hello"), HasSubstr("it is not JSON, at byte 1"));
  EXPECT_THAT(refusal("1e999"), HasSubstr("damaged or was not written by accelmgr"));
  for (const auto* text : {"{}", "[]", "3", R"({"state":{}})", R"({"state":1,"checksum":"x"})",
                           R"({"state":{},"checksum":1})", R"({"state":{},"checksum":"x","more":1})"})
    EXPECT_THAT(refusal(text), HasSubstr("was not written by accelmgr")) << text;
  EXPECT_THAT(refusal(sealed({{"version", 1}})), HasSubstr("was not written by accelmgr"));
  auto state = state_of(print_state(sample_state()));
  state["files"].erase("model.safetensors");
  EXPECT_THAT(refusal(sealed(state)), HasSubstr("was not written by accelmgr: [json"));
  for (const auto& [field, value] : std::vector<std::pair<std::string, json>>{
           {"step", 1.5}, {"step", -1}, {"metric", 531}, {"run", 1}, {"more", 1}}) {
    state = state_of(print_state(sample_state()));
    state[field] = value;
    EXPECT_THAT(refusal(sealed(state)), HasSubstr("was not written by accelmgr")) << field << " " << value;
  }
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
