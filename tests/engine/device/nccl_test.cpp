// Tests of loading NCCL, with stubs of it: no GPU and no NCCL is needed.
#include "base/cuda/nccl.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "places.hpp"

namespace accelmgr::device {
namespace {

/// A stub of NCCL: whole, old or mute.
std::string stub_nccl(const std::string& name) {
  return test::built("tests/engine/device/libaccelmgr_" + name + "_nccl.so");
}

TEST(Nccl, IsLookedForWithTorchAndThenByTheDynamicLinker) {
  EXPECT_EQ(nccl_candidates({"/venv/site-packages"}),
            (std::vector<std::string>{"/venv/site-packages/nvidia/nccl/lib/libnccl.so.2", "libnccl.so.2"}));
}

TEST(Nccl, FillsTheTableFromTheFirstLibraryThatIsThere) {
  const auto nccl = load_nccl({"/nowhere/libnccl.so.2", stub_nccl("whole"), stub_nccl("old")});
  EXPECT_STREQ(nccl.error_text(nccl_code::system_error), "a system error");
  EXPECT_STREQ(nccl.last_error(nullptr), "the last one");
  NcclId id{};
  EXPECT_EQ(nccl.get_unique_id(&id), nccl_code::success);
  NcclConfig config{.blocking = 0};
  CommunicatorHandle communicator = nullptr;
  EXPECT_EQ(nccl.init_rank(&communicator, 3, id, 2, &config), 32);
  NcclCode error = 0;
  EXPECT_EQ(nccl.async_error(nullptr, &error), nccl_code::success);
  EXPECT_EQ(error, nccl_code::in_progress);
  EXPECT_EQ(nccl.send(nullptr, 0, NcclType::int8, 1, nullptr, nullptr), nccl_code::success);
}

TEST(Nccl, ThatIsTooOldOrCannotSayItsVersionIsRefused) {
  for (const auto& [stub, part] : {std::pair("old", "its version is 21304, and 21400 is the oldest"),
                                   std::pair("mute", "ncclGetVersion: a system error")}) {
    const auto text = test::message_of<UsageError>([&stub = stub] { load_nccl({stub_nccl(stub)}); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(Nccl, IsInNoProcessThatDoesNotAskForIt) {
  EXPECT_EQ(dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD), nullptr);
}

}  // namespace
}  // namespace accelmgr::device
