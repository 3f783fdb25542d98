#include "launcher/distributed/context/world_environment.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables) {
  return read_environment([&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

/// "rank 5 of 8, local rank 1 of 4, node 1 of 2"; -1 stands for what is not known.
std::string text_of(const Place& place) {
  return fmt::format("rank {} of {}, local rank {} of {}, node {} of {}", place.rank, place.world_size,
                     place.local_rank.value_or(-1), place.local_world_size.value_or(-1),
                     place.node_rank.value_or(-1), place.node_count.value_or(-1));
}

TEST(Environment, OfNothingHasNoRanks) {
  const auto environment = read({});
  EXPECT_FALSE(environment.rank || environment.world_size);
  EXPECT_EQ(environment, Environment{});
}

TEST(Environment, OfTorchrunIsReadWhole) {
  const auto environment = read({{"RANK", "5"},
                                 {"WORLD_SIZE", "8"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "4"},
                                 {"GROUP_RANK", "1"},
                                 {"GROUP_WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "10.0.0.1"},
                                 {"MASTER_PORT", "29400"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                 {"TORCHELASTIC_RESTART_COUNT", "3"}});
  EXPECT_TRUE(environment.rank && environment.world_size);
  EXPECT_FALSE(environment.by_accelmgr());
  EXPECT_TRUE(environment.agent_store);
  EXPECT_EQ(environment.restart_count, 3);
  EXPECT_EQ(text_of(place_of(environment)), "rank 5 of 8, local rank 1 of 4, node 1 of 2");
}

TEST(Environment, OfTheLauncherChoosesTheInterfaceBeforeThatOfGloo) {
  EXPECT_EQ(read({{"GLOO_SOCKET_IFNAME", "eth0,eth1"}}).interface, "eth0");
  EXPECT_EQ(read({{"GLOO_SOCKET_IFNAME", "eth0"}, {"ACCELMGR_LAUNCH_INTERFACE", "ib0"}}).interface, "ib0");
}

TEST(Environment, NamesWhatCannotBe) {
  const std::vector<std::pair<Variables, std::vector<std::string>>> bad = {
      {{{"RANK", "x"}, {"WORLD_SIZE", "2"}}, {"RANK=x"}},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, {"RANK=-1", "at least 0"}},
      {{{"RANK", "1e"}, {"WORLD_SIZE", "2"}}, {"RANK=1e"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"WORLD_SIZE=0", "at least 1"}},
      {{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, {"RANK=2", "WORLD_SIZE=2"}},
      {{{"LOCAL_RANK", "4"}, {"LOCAL_WORLD_SIZE", "4"}}, {"LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"}},
      {{{"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "4"}}, {"LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"}},
      {{{"GROUP_RANK", "2"}, {"GROUP_WORLD_SIZE", "2"}}, {"GROUP_RANK=2", "GROUP_WORLD_SIZE=2"}},
      {{{"MASTER_PORT", "65536"}}, {"MASTER_PORT=65536", "65535"}},
      {{{"ACCELMGR_LAUNCH_TIMEOUT", "0"}}, {"ACCELMGR_LAUNCH_TIMEOUT=0", "seconds"}},
      {{{"ACCELMGR_LAUNCH_TIMEOUT", "nan"}}, {"ACCELMGR_LAUNCH_TIMEOUT=nan"}},
  };
  for (const auto& [variables, parts] : bad) {
    const auto message = message_of<ConfigError>([&variables = variables] { read(variables); });
    for (const auto& part : parts) EXPECT_THAT(message, HasSubstr(part));
  }
}

TEST(Environment, WithoutLocalRanksIsOneNodesAtALoopbackAddress) {
  Variables variables{{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}};
  EXPECT_EQ(text_of(place_of(read(variables))), "rank 2 of 3, local rank 2 of 3, node 0 of 1");
  variables["MASTER_ADDR"] = "10.0.0.1";
  EXPECT_FALSE(place_of(read(variables)).is_complete());
}

TEST(Environment, FillsInNodesThatHaveAsManyRanksEach) {
  EXPECT_EQ(text_of(place_of(read({{"RANK", "5"}, {"WORLD_SIZE", "6"}, {"LOCAL_WORLD_SIZE", "2"}}))),
            "rank 5 of 6, local rank 1 of 2, node 2 of 3");
  EXPECT_FALSE(place_of(read({{"RANK", "4"}, {"WORLD_SIZE", "5"}, {"LOCAL_WORLD_SIZE", "2"}})).is_complete());
}

TEST(Place, AmongNodesIsByTheirLowestRanks) {
  const std::vector<std::string> nodes{"b", "a", "b", "c", "a"};
  EXPECT_EQ(text_of(place_among(4, nodes)), "rank 4 of 5, local rank 1 of 2, node 1 of 3");
}

}  // namespace
}  // namespace accelmgr::distributed
