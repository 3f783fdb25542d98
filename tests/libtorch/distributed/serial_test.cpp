// Checks that every function works in a process that was not launched with others.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>

#include "accelmgr/distributed.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::message_of;
using testing::HasSubstr;

TEST(Serial, IsOnTheCpu) { EXPECT_TRUE(device().is_cpu()); }

TEST(Serial, CollectivesReturnTheirInput) {
  const auto tensor = at::ones({2, 3}, at::TensorOptions(at::kFloat).requires_grad(true));
  EXPECT_TRUE(all_reduce(tensor).is_same(tensor));
  EXPECT_TRUE(all_reduce(tensor, "AVG", std::vector<int>{0}).is_same(tensor));
  EXPECT_TRUE(all_gather(tensor).is_same(tensor));
  EXPECT_TRUE(at::equal(all_gather(at::ones({}, at::kFloat)), at::ones({1}, at::kFloat)));
  EXPECT_TRUE(broadcast(tensor).is_same(tensor));
  EXPECT_TRUE(broadcast(tensor, 0, true).is_same(tensor));
  EXPECT_TRUE(reduce_scatter(tensor).is_same(tensor));
  EXPECT_TRUE(all_to_all(tensor).is_same(tensor));
  EXPECT_EQ(std::get<std::string>(broadcast(Broadcast("text"))), "text");
  EXPECT_TRUE(at::equal(all_gather(2.5), at::ones({1}, at::kDouble) * 2.5));
  EXPECT_THAT(message_of<UsageError>([] { broadcast(Broadcast()); }), HasSubstr("passed no value"));
}

}  // namespace
}  // namespace accelmgr::distributed
