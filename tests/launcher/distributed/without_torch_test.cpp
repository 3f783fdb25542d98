// Tests of a program that links no torch: functions that need torch throw an error that says so, all others
// work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/distributed_context.hpp"
#include "launcher/distributed/store/tcp_store.hpp"
#include "launcher/distributed/store/torch.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

TEST(WithoutTorch, AStoreAtAnAddressIsRefusedAtOnce) {
  const auto says = [](const char* address) {
    return AllOf(HasSubstr(address), HasSubstr("no torch"), HasSubstr("file:///PATH"));
  };
  EXPECT_THAT(message_of<ConfigError>([] { TcpStore::serve(ipc::bind_tcp("127.0.0.1", 0)); }),
              says("127.0.0.1:"));
  EXPECT_THAT(
      message_of<ConfigError>([] { TcpStore::connect("127.0.0.1", 1, base::Deadline::in_seconds(1000)); }),
      says("127.0.0.1:1 "));
  EXPECT_THAT(message_of<ConfigError>([] {
                initialize("shm", {.init_method = "tcp://127.0.0.1:1", .rank = 1, .world_size = 2});
              }),
              says("127.0.0.1:1 "));
  EXPECT_EQ(model_name(), "serial");
}

TEST(WithoutTorch, ThereAreNoDevices) {
  EXPECT_FALSE(has_native_dist_support());
  EXPECT_EQ(cuda_device(3), std::nullopt);
  EXPECT_NO_THROW(use_cuda_device(3));
}

}  // namespace
}  // namespace accelmgr::distributed
