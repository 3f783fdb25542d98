// Fuzz tests of the messages between a launching process and its ranks, beside
// tests/fuzz/launch_messages.cpp.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/socket.hpp"
#include "fuzzed.hpp"
#include "launcher/launch/run/child_messages.hpp"
#include "launcher/launch/run/text_message.hpp"
#include "message_of.hpp"

namespace accelmgr::launch {
namespace {

using accelmgr::test::Fuzzed;
using accelmgr::test::message_of;

constexpr int rounds = 4000;

const Call call{.setup = "prepare", .function = "add", .args = {1, "two", {{"three", 3.0}}}};

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
