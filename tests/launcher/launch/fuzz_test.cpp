// Fuzz tests of the messages between a launching process and its ranks: damaged messages must be refused.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <functional>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/socket.hpp"
#include "fuzzed.hpp"
#include "launcher/launch/run/task.hpp"
#include "launcher/launch/run/text_message.hpp"
#include "message_of.hpp"

namespace accelmgr::launch {
namespace {

using accelmgr::test::Fuzzed;
using accelmgr::test::message_of;

constexpr int rounds = 4000;

const Order order{.rank = 3,
                  .environment = {{"PATH", "/bin"}, {"WHO", "me"}},
                  .targets = {1, 9},
                  .program = {"sh", "-c", "true"},
                  .execute_self = false,
                  .call = true};
const Call call{.setup = "prepare", .function = "add", .args = {1, "two", {{"three", 3.0}}}};
const Report report{.result = Value{1, 2},
                    .failure = Failure{.time_s = 1.5,
                                       .rank = 1,
                                       .exit_code = 17,
                                       .exit = "exit code 17",
                                       .phase = "setup",
                                       .type = "std::runtime_error",
                                       .what = "no data",
                                       .trace = "#0"}};

/// Decodes many damaged texts. Each must decode or throw SessionError.
void expect_only_session_errors(const std::string& valid,
                                const std::function<void(const std::string&)>& decode) {
  Fuzzed fuzzed(20261122);
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string text;
    if (fuzzed.one_in(10))
      text = fuzzed.bytes(200);
    else if (fuzzed.one_in(2))
      text = fuzzed.mutated(valid);
    else
      Value::to_cbor(fuzzed.mutated(Value::from_cbor(valid)), text);
    try {
      decode(text);
    } catch (const SessionError&) {
      ++refused;
    } catch (const std::exception& error) {
      FAIL() << error.what() << " in round " << round;
    }
  }
  EXPECT_GT(refused, rounds / 4);
  EXPECT_LT(refused, rounds) << "not one was right";
}

bool has_nul(const std::string& text) { return text.find('\0') != std::string::npos; }

TEST(LaunchFuzz, AnOrderIsWhatItMustBeOrAnError) {
  expect_only_session_errors(encode(order), [](const std::string& text) {
    const auto read = decode_order(text);
    EXPECT_GE(read.rank, 0);
    for (const int target : read.targets) EXPECT_TRUE(target >= 0 && target < 1 << 20) << target;
    for (const auto& [name, value] : read.environment)
      EXPECT_TRUE(!name.empty() && name.find('=') == std::string::npos && !has_nul(name) && !has_nul(value));
    for (const auto& argument : read.program) EXPECT_FALSE(has_nul(argument));
  });
}

TEST(LaunchFuzz, ACallIsWhatItMustBeOrAnError) {
  expect_only_session_errors(encode(call), [](const std::string& text) { decode_call(text); });
}

TEST(LaunchFuzz, AReportIsWhatItMustBeOrAnError) {
  expect_only_session_errors(encode(report), [](const std::string& text) {
    const auto read = decode_report(text);
    if (!read.failure) return;
    EXPECT_TRUE(read.failure->exit_code >= 0 && read.failure->exit_code <= 255);
    EXPECT_TRUE(read.failure->signal >= 0 && read.failure->signal <= SIGRTMAX);
    EXPECT_TRUE(std::isfinite(read.failure->time_s));
  });
}

TEST(LaunchFuzz, WhatIsNestedTooDeepIsRefusedBeforeTheStackEnds) {
  constexpr char list_of_one = '\x81';
  const auto message = message_of<SessionError>([] { decode_call(std::string(10'000'000, list_of_one)); });
  EXPECT_EQ(message, "the call of a launch is nested deeper than 256 levels");
  Call deep = call;
  for (int level = 0; level < 200; ++level) deep.args = Value::array({deep.args});
  EXPECT_EQ(decode_call(encode(deep)).args, deep.args);
}

TEST(LaunchFuzz, ATextMessageIsATextOrAnError) {
  Fuzzed fuzzed(20261122);
  const auto open_before = accelmgr::test::open_count();
  int read = 0;
  for (int round = 0; round < rounds / 4; ++round) {
    auto [ours, theirs] = ipc::socket_pair();
    auto fds = accelmgr::test::some_descriptors(fuzzed, 2);
    if (fuzzed.one_in(2)) {
      const auto bytes = 1 + fuzzed.below(100'000);
      const bool sealed = fuzzed.one_in(2);
      fds.insert(fds.begin(), sealed ? ipc::create_memfd("sealed", bytes)
                                     : base::UniqueFd(memfd_create("not sealed", MFD_CLOEXEC)));
      if (!sealed) {
        ASSERT_EQ(ftruncate(fds[0].get(), static_cast<off_t>(bytes)), 0);
      }
    }
    const auto packet =
        fuzzed.one_in(3) ? fuzzed.bytes(30) : (fuzzed.one_in(2) ? "m" : "w") + fuzzed.bytes(9);
    ASSERT_TRUE(accelmgr::test::send_raw(theirs.get(), packet, fds));
    try {
      EXPECT_TRUE(receive_text_message(ours.get(), base::Deadline::in_seconds(10)));
      ++read;
    } catch (const SessionError&) {
    }
  }
  EXPECT_TRUE(read > 0 && read < rounds / 4) << read;
  EXPECT_EQ(accelmgr::test::open_count(), open_before);
}

TEST(LaunchFuzz, AMemoryThatItsSenderCouldShrinkIsNoTextMessage) {
  auto [ours, theirs] = ipc::socket_pair();
  std::vector<base::UniqueFd> fds;
  fds.emplace_back(memfd_create("not sealed", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fds[0].get(), 20'000), 0);
  ASSERT_TRUE(accelmgr::test::send_raw(theirs.get(), "m", fds));
  EXPECT_THROW(receive_text_message(ours.get(), base::Deadline::in_seconds(10)), SessionError);
}

}  // namespace
}  // namespace accelmgr::launch
