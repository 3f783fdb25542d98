#include "engine/data/text_source.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "engine/data/fixtures.hpp"

namespace accelmgr::test {
namespace {

using Window = std::vector<std::int64_t>;

// A text of numbers that count up, of three digits each and each behind `mark`. Every run of six bytes occurs
// once, so a window shows where it was cut.
std::string distinct_text(char mark, std::size_t bytes) {
  std::string text;
  for (int number = 100; text.size() < bytes; ++number) text += mark + std::to_string(number);
  text.resize(bytes);
  return text;
}

struct Cut {
  char mark;
  std::size_t begin;
  auto operator<=>(const Cut&) const = default;
};

// Three documents of different marks and lengths. locate() finds where a window lies in them.
class TextSourceTest : public ::testing::Test {
 protected:
  TextSourceTest() {
    add('a', 1000);
    add('b', 203);
    add('c', 17);  // Just one element.
    config_.model.kind = "torchscript";
    config_.data.kind = "text";
    config_.data.files = {folder_ / "*"};
    config_.data.sequence_length = 16;
    config_.data.epochs = 1;
  }

  void add(char mark, std::size_t bytes) {
    texts_[mark] = distinct_text(mark, bytes);
    folder_.write(std::string(1, mark), texts_[mark]);
  }

  Cut locate(const Window& window) const {
    const std::string text(window.begin(), window.end());
    for (const auto& [mark, whole] : texts_) {
      if (const auto begin = whole.find(text); begin != std::string::npos) return {mark, begin};
    }
    ADD_FAILURE() << "'" << text << "' lies in no document";
    return {};
  }

  std::vector<Cut> cuts(BatchSource& source) const {
    std::vector<Cut> out;
    for (const Window& window : Reader(source).take<std::int64_t>()) out.push_back(locate(window));
    return out;
  }

  std::vector<Window> windows(std::size_t count = 1'000'000) const {
    return Reader(*make_data(config_)).take<std::int64_t>(count);
  }

  std::string error() const {
    return message_of<DataError>([&] { make_data(config_); });
  }
  std::string wrong_key() const {
    return config_key_of([&] { make_data(config_); });
  }

  TemporaryFolder folder_;
  std::map<char, std::string> texts_;
  Config config_;
};

TEST_F(TextSourceTest, TheTargetIsTheNextByteOfTheSameDocument) {
  const auto source = make_data(config_);
  Reader reader(*source);
  while (reader.next()) {
    const auto input = reader.values<std::int64_t>(0);
    const auto target = reader.values<std::int64_t>(1);
    const Cut cut = locate(input);
    ASSERT_TRUE(std::equal(input.begin() + 1, input.end(), target.begin()));
    ASSERT_EQ(target.back(), texts_.at(cut.mark).at(cut.begin + 16));
  }
}

TEST_F(TextSourceTest, BytesAreNumbersFrom0To255) {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  config_.data.files = {folder_.write("bytes", text + text)};
  std::set<std::int64_t> seen;
  for (const Window& window : windows()) seen.insert(window.begin(), window.end());
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 255);
}

TEST_F(TextSourceTest, AnEpochCutsEachDocumentOnceWithoutOverlapOrGap) {
  const auto source = make_data(config_);
  std::map<char, std::vector<std::size_t>> begins;
  for (const Cut& cut : cuts(*source)) begins[cut.mark].push_back(cut.begin);
  ASSERT_EQ(begins.size(), 3U);
  for (auto& [mark, document] : begins) {
    std::sort(document.begin(), document.end());
    EXPECT_LT(document.front(), 16U);
    for (std::size_t k = 1; k < document.size(); ++k) EXPECT_EQ(document[k], document[k - 1] + 16);
    const std::size_t target_end = document.back() + 17;
    EXPECT_LE(target_end, texts_.at(mark).size());
    EXPECT_GT(target_end + 16, texts_.at(mark).size()) << "a further window would have fitted";
  }
}

TEST_F(TextSourceTest, EpochsAreShuffledAndCutAtDifferentPhases) {
  std::set<std::size_t> phases;
  config_.data.epochs = 0;
  const auto source = make_data(config_);
  Reader reader(*source);
  std::vector<Cut> all;
  for (const Window& window : reader.take<std::int64_t>(20 * 74)) all.push_back(locate(window));
  for (const Cut& cut : all) {
    if (cut.mark == 'a') phases.insert(cut.begin % 16);
  }
  EXPECT_GT(phases.size(), 5U);
  EXPECT_FALSE(std::is_sorted(all.begin(), all.begin() + 70));
}

TEST_F(TextSourceTest, TheSameSeedGivesTheSameElementsAndAnotherSeedOthers) {
  config_.data.epochs = 3;
  config_.data.seed = 1;
  const auto first = windows();
  EXPECT_EQ(windows(), first);
  config_.data.seed = 2;
  EXPECT_NE(windows(), first);
}

TEST_F(TextSourceTest, EpochsFollowEachOtherAndEnd) {
  const auto source = make_data(config_);
  EXPECT_EQ(source->held_out(), nullptr);
  Reader reader(*source);
  const auto one = reader.take<std::int64_t>();
  EXPECT_FALSE(reader.next()) << "the end stays";
  config_.data.epochs = 2;
  const auto two = windows();
  EXPECT_GT(two.size(), one.size() + 60);
  EXPECT_TRUE(std::equal(one.begin(), one.end(), two.begin()));
  config_.data.epochs = 0;
  EXPECT_EQ(windows(1000).size(), 1000U);
}

TEST_F(TextSourceTest, GoesOnFromAStateAnywhere) {
  config_.data.epochs = 3;
  expect_states_restore([&] { return make_data(config_); }, 1000);
  config_.data.epochs = 0;
  expect_states_restore([&] { return make_data(config_); }, 200);
}

TEST_F(TextSourceTest, AStateOfOtherTextIsRefused) {
  config_.data.epochs = 2;
  const std::string identity = "text seed=0 documents=3 bytes=1220 sequence_length=16 ";
  const auto state = *make_data(config_)->state();
  EXPECT_EQ(state, identity + "epoch=0 position=0");
  for (const char* beyond : {"epoch=2 position=0", "epoch=1 position=76"})
    refusal(*make_data(config_), identity + beyond);
  config_.data.sequence_length = 15;
  refusal(*make_data(config_), state);
  config_.data.sequence_length = 16;
  config_.data.seed = 1;
  refusal(*make_data(config_), state);
  config_.data.seed = 0;
  add('a', 999);
  expect_contains(refusal(*make_data(config_), state), {"bytes is 1220; here it is 1219"});
  add('d', 30);
  expect_contains(refusal(*make_data(config_), state), {"documents is 3; here it is 4"});
}

TEST_F(TextSourceTest, NoDocumentIsBothTrainedOnAndHeldOut) {
  for (char mark = 'd'; mark <= 'l'; ++mark) add(mark, 400);
  config_.data.held_out = 0.3;
  config_.data.epochs = 5;
  for (const std::uint64_t seed : {1, 2, 3}) {
    config_.data.seed = seed;
    const auto source = make_data(config_);
    std::set<char> trained;
    std::set<char> held_out;
    for (const Cut& cut : cuts(*source)) trained.insert(cut.mark);
    for (const Cut& cut : cuts(*source->held_out())) held_out.insert(cut.mark);
    EXPECT_FALSE(held_out.empty());
    EXPECT_EQ(trained.size() + held_out.size(), texts_.size());
    for (const char mark : held_out) EXPECT_FALSE(trained.contains(mark)) << mark;
  }
}

TEST_F(TextSourceTest, HeldOutWindowsFollowEachOtherFromTheFirstByteAndRestart) {
  config_.data.held_out = 0.2;
  const auto source = make_data(config_);
  const auto windows_of = [&] { return cuts(*source->held_out()); };
  const auto all = windows_of();
  std::map<char, std::size_t> next;
  for (const Cut& cut : all) {
    EXPECT_EQ(cut.begin, next[cut.mark]);
    next[cut.mark] += 16;
  }
  for (const auto& [mark, end] : next) EXPECT_EQ(end / 16, (texts_.at(mark).size() - 1) / 16);
  EXPECT_FALSE(all.empty());
  EXPECT_EQ(windows_of(), all);
}

TEST_F(TextSourceTest, HeldOutOutlivesTheSourceItCameFrom) {
  config_.data.held_out = 0.2;
  auto source = make_data(config_);
  const auto held_out = source->held_out();
  source.reset();
  EXPECT_FALSE(cuts(*held_out).empty());
}

TEST_F(TextSourceTest, AFileShorterThanAnElementIsRefusedWithItsBytesAndThoseNeeded) {
  const auto path = folder_.write("short", "0123456789abcdef");
  expect_contains(error(), {"'" + path + "'", "has 16 bytes", "takes 17", "data.sequence_length 16"});
}

TEST_F(TextSourceTest, ProblemsOfFilesReachTheCaller) {
  config_.data.files = {"no-such-file.txt"};
  expect_contains(error(), {"data source 'text'", "no-such-file.txt"});
}

TEST_F(TextSourceTest, ValuesOutOfRangeAreRefusedByKey) {
  config_.data.epochs = -1;
  EXPECT_EQ(wrong_key(), "data.epochs");
  config_.data.epochs = 1;
  config_.data.sequence_length = 0;
  EXPECT_EQ(wrong_key(), "data.sequence_length");
}

TEST_F(TextSourceTest, AGptThatCannotTakeTheTextIsRefused) {
  config_.model.kind = "gpt";
  config_.model.gpt.context = 15;
  EXPECT_EQ(wrong_key(), "data.sequence_length");
  config_.model.gpt.context = 16;
  EXPECT_NO_THROW(make_data(config_));
  config_.model.gpt.vocabulary = 255;
  EXPECT_EQ(wrong_key(), "model.gpt.vocabulary");
}

}  // namespace
}  // namespace accelmgr::test
