// Checks that open() refuses each kind of damaged checkpoint and says what is wrong with it.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/checksum.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* tensor_files[] = {"model.safetensors", "training.safetensors"};

class Damage : public ::testing::Test {
 protected:
  std::string refusal() const { return refusal_of(path_); }
  static std::string refusal_of(const fs::path& path) {
    return message_of<CheckpointError>([&] { open(path); });
  }

  const TemporaryFolder directory_;
  const fs::path path_ = write_sample(directory_.path(), 7).path;
};

TEST_F(Damage, ATruncatedFileIsTornAndBothSizesAreSaid) {
  for (const std::string name : tensor_files) {
    const auto whole = read_text(path_ / name);
    for (const std::size_t length :
         {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{100}, whole.size() - 1}) {
      write_text(path_ / name, whole.substr(0, length));
      EXPECT_THAT(refusal(), HasSubstr(name + "' is torn: it has " + std::to_string(length) +
                                       " bytes instead of " + std::to_string(whole.size())));
    }
    write_text(path_ / name, whole + "x");
    EXPECT_THAT(refusal(), HasSubstr(name + "' is torn: it has " + std::to_string(whole.size() + 1)));
    write_text(path_ / name, whole);
  }
  EXPECT_TRUE(is_sample(open(path_), 7));
}

TEST_F(Damage, AFlippedByteIsToldByTheChecksum) {
  for (const std::string name : tensor_files) {
    const auto whole = read_text(path_ / name);
    const auto right = checksum_of(std::as_bytes(std::span(whole)));
    for (std::size_t at = 0; at < whole.size(); ++at) {
      auto flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ 1);
      write_text(path_ / name, flipped);
      EXPECT_THAT(refusal(), AllOf(HasSubstr(name + "' is damaged: its checksum is xxh3-128:"),
                                   HasSubstr("instead of " + right)))
          << at;
    }
    write_text(path_ / name, whole);
  }
  EXPECT_TRUE(is_sample(open(path_), 7));
}

TEST_F(Damage, ATornOrFlippedStateIsRefusedByName) {
  auto text = read_text(path_ / "state.json");
  write_text(path_ / "state.json", text.substr(0, text.size() / 2));
  EXPECT_THAT(refusal(), HasSubstr("step-00000007/state.json' is torn"));
  text[text.size() / 2] ^= 1;
  write_text(path_ / "state.json", text);
  EXPECT_THAT(refusal(), HasSubstr("step-00000007/state.json' is damaged"));
}

TEST_F(Damage, AMissingFileIsNamed) {
  for (const std::string name : tensor_files) {
    fs::rename(path_ / name, directory_ / name);
    EXPECT_THAT(refusal(), HasSubstr("step-00000007/" + name + "' is missing; "));
    fs::rename(directory_ / name, path_ / name);
  }
  fs::remove(path_ / "state.json");
  EXPECT_THAT(refusal(), HasSubstr("step-00000007' is not a checkpoint: it has no state.json"));
}

TEST_F(Damage, AFolderNamedAfterAnotherStepIsRefused) {
  fs::rename(path_, directory_ / "step-00000009");
  EXPECT_THAT(refusal_of(directory_ / "step-00000009"), HasSubstr("step-00000009' holds step 7"));
  fs::rename(directory_ / "step-00000009", directory_ / "the best");
  EXPECT_TRUE(is_sample(open(directory_ / "the best"), 7));
}

TEST_F(Damage, WhatIsNoFileIsNotWaitedFor) {
  for (const std::string name : {"model.safetensors", "state.json"}) {
    fs::remove(path_ / name);
    ASSERT_EQ(mkfifo((path_ / name).c_str(), 0600), 0);
    EXPECT_THAT(refusal(), HasSubstr(name + "' is not a regular file"));
  }
}

TEST_F(Damage, AnUnsoundFileUnderARightChecksumIsRefused) {
  const auto state = nlohmann::json::parse(read_text(path_ / "state.json"))["state"];
  const std::string text = "no tensors in here";
  write_text(path_ / "model.safetensors", text);
  auto changed = state;
  changed["files"]["model.safetensors"] = {{"bytes", text.size()},
                                           {"checksum", checksum_of(std::as_bytes(std::span(text)))}};
  const auto dump = changed.dump();
  const nlohmann::json sealed{{"checksum", checksum_of(std::as_bytes(std::span(dump)))}, {"state", changed}};
  write_text(path_ / "state.json", sealed.dump(1) + "\n");
  EXPECT_THAT(refusal(), HasSubstr("model.safetensors' is not a whole safetensors file"));
}

TEST_F(Damage, APathThatIsNoCheckpointSaysWhatItIs) {
  EXPECT_THAT(refusal_of(directory_ / "nothing"), HasSubstr("nothing' does not exist"));
  EXPECT_THAT(refusal_of(path_ / "state.json"),
              HasSubstr("state.json' is not a directory; a checkpoint is a folder"));
  fs::create_directory(directory_ / "empty");
  EXPECT_THAT(refusal_of(directory_ / "empty"),
              HasSubstr("empty' is not a checkpoint: it has no state.json"));
  EXPECT_THAT(refusal_of(directory_.path()),
              AllOf(HasSubstr("but a directory of checkpoints"), HasSubstr("step-00000007'")));
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
