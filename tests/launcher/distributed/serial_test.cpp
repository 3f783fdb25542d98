// Checks that every function works in a process that was not launched with others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/distributed_context.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace accelmgr::distributed {
namespace {

using test::message_of;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(Serial, IsRankZeroOfOne) {
  test::expect_place(0, 1);
  EXPECT_EQ(backend(), std::nullopt);
  EXPECT_EQ(model_name(), "serial");
  EXPECT_EQ(device_name(), "cpu");
  EXPECT_FALSE(hostname().empty());
}

TEST(Serial, SaysWhatThereIs) {
  EXPECT_TRUE(has_native_dist_support());
  EXPECT_FALSE(has_xla_support());
  EXPECT_FALSE(has_hvd_support());
  EXPECT_THAT(registered_computation_models(), ElementsAre("serial", "native-dist", "accelmgr-dist"));
  EXPECT_THAT(available_backends(), AllOf(Contains("shm"), Not(Contains("serial"))));
}

TEST(Serial, CollectivesReturnTheirInput) {
  EXPECT_EQ(all_reduce(2.5, "MAX"), 2.5);
  EXPECT_EQ(broadcast(2.5), 2.5);
  EXPECT_EQ(broadcast("text"), "text");
  EXPECT_THAT(all_gather("text"), ElementsAre("text"));
  EXPECT_THAT(all_gather_object({{"a", 1}}), ElementsAre(Value{{"a", 1}}));
  barrier();
}

TEST(Serial, GroupsAreOfRankZero) {
  const auto group = new_group({0});
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  EXPECT_TRUE(group.contains(0));
  EXPECT_FALSE(group.contains(1));
  EXPECT_EQ(all_reduce(3.0, "SUM", group), 3.0);
  const auto nobody = new_group({});
  EXPECT_EQ(nobody.rank(), -1);
  EXPECT_EQ(nobody.size(), 0);
  EXPECT_EQ(all_reduce(3.0, "SUM", nobody), 3.0);
  EXPECT_THAT(message_of<ConfigError>([] { new_group({0, 0}); }), HasSubstr("[0, 0]"));
  EXPECT_THAT(message_of<ConfigError>([] { new_group({1}); }),
              AllOf(HasSubstr("rank 1"), HasSubstr("world of 1")));
  EXPECT_THAT(message_of<ConfigError>([] { all_reduce(1.0, "SUM", std::vector<int>{-1}); }),
              HasSubstr("rank -1"));
}

TEST(Serial, WrongArgumentsAreNamed) {
  EXPECT_THAT(
      message_of<UsageError>([] { all_reduce(1.0, "sum"); }),
      AllOf(HasSubstr("'sum'"), HasSubstr("did you mean 'SUM'"), HasSubstr("PRODUCT"), HasSubstr("OR")));
  EXPECT_THROW(broadcast(1.0, 1), UsageError);
  EXPECT_THAT(message_of<UsageError>([] { set_local_rank(-1); }), HasSubstr("-1"));
}

TEST(Serial, OneRankRunsWhatOneRankRuns) {
  int calls = 0;
  const auto count = one_rank_only([&calls](int by) { return calls += by; }, 0, /*with_barrier=*/true);
  EXPECT_EQ(count(3), 3);
  EXPECT_EQ(one_rank_only([&calls] { return ++calls; }, 1)(), std::nullopt);
  one_rank_only([&calls] { ++calls; })();
  EXPECT_EQ(calls, 4);
  { const auto first = one_rank_first(); }
  EXPECT_THROW(static_cast<void>(one_rank_first(1)), ConfigError);
}

TEST(Serial, FinalizeAndSyncDoNothing) {
  finalize();
  sync();
  sync(true);
  sync();
  EXPECT_EQ(model_name(), "serial");
  set_local_rank(5);
  EXPECT_EQ(get_local_rank(), 0);
  finalize();
}

TEST(Serial, InitializeSaysWhatIsMissing) {
  const auto refusal = [](const InitializeOptions& options) {
    return message_of<ConfigError>([&] { initialize("shm", options); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(refusal({.world_size = 2}), HasSubstr("RANK is not set"));
  EXPECT_NE(refusal({.rank = 0, .world_size = 2}), "");
  EXPECT_THAT(refusal({.rank = 2, .world_size = 2}), AllOf(HasSubstr("rank is 2"), HasSubstr("0 to 1")));
  EXPECT_THAT(refusal({.rank = 0, .world_size = 0}), HasSubstr("world_size is 0"));
  EXPECT_THAT(refusal({.timeout_s = 0, .rank = 0, .world_size = 1}), HasSubstr("timeout_s is 0"));
  EXPECT_THAT(refusal({.init_method = "udp://x:1", .rank = 0, .world_size = 2}),
              AllOf(HasSubstr("udp://x:1"), HasSubstr("tcp://HOST:PORT"), HasSubstr("file:///PATH")));
  EXPECT_THAT(refusal({.init_method = "tcp://x", .rank = 0, .world_size = 2}),
              HasSubstr("init_method 'tcp://x': "));
  EXPECT_THAT(refusal({.init_method = "file://x", .rank = 0, .world_size = 2}), HasSubstr("file:///PATH"));
}

TEST(Serial, AnUnknownBackendListsTheAvailableOnes) {
  EXPECT_THAT(message_of<ConfigError>([] { initialize("smh"); }),
              AllOf(HasSubstr("'smh'"), HasSubstr("did you mean 'shm'"), HasSubstr("available are: shm")));
  EXPECT_EQ(test::config_key_of([] { initialize("glo"); }), "launch.backend");
  EXPECT_THAT(message_of<ConfigError>([] { initialize("nccl"); }), HasSubstr("'nccl' cannot be used"));
}

TEST(Serial, AWorldOfOneIsAContext) {
  initialize("shm", {.rank = 0, .world_size = 1});
  EXPECT_EQ(model_name(), "native-dist");
  EXPECT_EQ(backend(), "shm");
  EXPECT_EQ(get_nnodes(), 1);
  set_local_rank(4);
  EXPECT_EQ(get_local_rank(), 4);
  EXPECT_THAT(message_of<UsageError>([] { initialize("shm", {.rank = 0, .world_size = 1}); }),
              AllOf(HasSubstr("context already"), HasSubstr("finalize()")));
  const auto group = new_group({0});
  finalize();
  EXPECT_EQ(model_name(), "serial");
  EXPECT_EQ(get_local_rank(), 0);
  EXPECT_THAT(message_of<UsageError>([&] { all_reduce(1.0, "SUM", group); }), HasSubstr("ended"));
}

}  // namespace
}  // namespace accelmgr::distributed
