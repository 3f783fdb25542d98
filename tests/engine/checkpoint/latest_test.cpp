// Tests of open_latest(): it opens the last good checkpoint, and says why it refused later ones.
#include <gmock/gmock.h>

#include "engine/checkpoint/checkpoint.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Latest : public ::testing::Test {
 protected:
  Checkpoint open_it() {
    return open_latest(directory_.path(), [&](const auto& folder, const std::string& reason) {
      EXPECT_NE(reason.find(folder.string()), std::string::npos);
      refused_.push_back(reason);
    });
  }
  std::string refusal() {
    return message_of<CheckpointError>([&] { open_it(); });
  }

  const TemporaryFolder directory_;
  std::vector<std::string> refused_;
};

TEST_F(Latest, IsTheHighestStepWhateverWasWrittenLast) {
  for (const std::uint64_t step : {9, 100, 20}) write_sample(directory_.path(), step);
  EXPECT_TRUE(is_sample(open_it(), 100));
  EXPECT_THAT(refused_, IsEmpty());
}

TEST_F(Latest, FallsBackToThePreviousGoodOneAndSaysWhy) {
  for (const std::uint64_t step : {1, 2, 3, 4}) write_sample(directory_.path(), step);
  fs::remove(directory_ / "step-00000004" / "state.json");
  fs::resize_file(directory_ / "step-00000003" / "model.safetensors", 10);
  fs::remove(directory_ / "step-00000001" / "state.json");
  EXPECT_TRUE(is_sample(open_it(), 2));
  EXPECT_THAT(refused_, ElementsAre(HasSubstr("step-00000004' is not a checkpoint"), HasSubstr("is torn")));
  EXPECT_TRUE(is_sample(open_latest(directory_.path(), {}), 2));
}

TEST_F(Latest, WithoutAGoodOneAllReasonsAreSaid) {
  for (const std::uint64_t step : {1, 2}) {
    write_sample(directory_.path(), step);
  }
  fs::resize_file(directory_ / "step-00000001" / "model.safetensors", 10);
  fs::remove(directory_ / "step-00000002" / "training.safetensors");
  write_text(directory_ / "step-00000003", "a file");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("holds no good checkpoint"),
                               HasSubstr("step-00000001/model.safetensors' is torn"),
                               HasSubstr("step-00000002/training.safetensors' is missing"),
                               HasSubstr("step-00000003' is not a directory")));
  EXPECT_EQ(refused_.size(), 3u);
}

TEST_F(Latest, WithoutAnyItIsSaidWhatIsLookedFor) {
  EXPECT_THAT(refusal(), HasSubstr("holds no checkpoint: nothing in it is named like 'step-00000123'"));
  for (const auto* name :
       {"step-1", "step-000000001", "step-0000000x", "step-", ".step-00000001.tmp-1", "best"})
    fs::create_directory(directory_ / name);
  EXPECT_THAT(refusal(), HasSubstr("holds no checkpoint"));
}

TEST_F(Latest, InWhatIsNoDirectoryIsRefused) {
  EXPECT_THAT(message_of<CheckpointError>([&] { open_latest(directory_ / "nothing", {}); }),
              HasSubstr("nothing' does not exist"));
  write_text(directory_ / "file", "");
  EXPECT_THAT(message_of<CheckpointError>([&] { open_latest(directory_ / "file", {}); }),
              HasSubstr("file' is not a directory"));
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
