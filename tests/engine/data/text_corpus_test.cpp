#include "engine/data/text_corpus.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <set>

#include "engine/data/fixtures.hpp"

namespace accelmgr::data {
namespace {

using test::config_key_of;
using test::expect_contains;
using test::message_of;
using test::TemporaryFolder;

std::vector<std::string> find(const std::vector<std::string>& patterns) { return find_files(patterns); }

std::set<std::string> paths_of(const std::vector<Document>& documents) {
  std::set<std::string> paths;
  for (const auto& document : documents) paths.insert(document.path);
  return paths;
}

// `count` documents of different text; document k has `bytes(k)` bytes.
template <typename Bytes>
std::vector<Document> make_documents(int count, Bytes bytes) {
  std::vector<Document> documents;
  for (int k = 0; k < count; ++k) {
    std::string text = fmt::format("document {} ", k);
    text.resize(static_cast<std::size_t>(bytes(k)), '.');
    documents.push_back({fmt::format("d{}", k), text});
  }
  return documents;
}

class TextFiles : public testing::Test {
 protected:
  std::vector<std::string> found(const std::string& pattern) const { return find({folder_ / pattern}); }
  /// Expects the path of `name` in the text of the refusal of `pattern`.
  void expect_refused(const std::string& pattern, const std::string& name, const std::string& why) const {
    expect_contains(message_of<DataError>([&] { found(pattern); }), {folder_ / name, why});
  }
  const TemporaryFolder folder_;
};

TEST_F(TextFiles, APathAndAGlobFindFilesSortedByPathAndEachOnce) {
  const auto b = folder_.write("b.txt", "b"), a = folder_.write("a.txt", "a");
  folder_.write("c.md", "c");
  EXPECT_EQ(found("*.txt"), (std::vector{a, b}));
  EXPECT_EQ(find({b, a, folder_ / "*.txt", folder_ / "./a.txt"}), (std::vector{a, b}));
}

TEST_F(TextFiles, LinksAreResolvedAndTheirFileIsFoundOnce) {
  const auto file = folder_.write("GPL-3", "text");
  std::filesystem::create_symlink("GPL-3", folder_ / "GPL");
  std::filesystem::create_symlink(folder_ / "GPL", folder_ / "GPL-link-to-link");
  EXPECT_EQ(found("*"), std::vector{file});
  EXPECT_EQ(found("GPL"), std::vector{file});
  std::filesystem::create_hard_link(folder_ / "GPL-3", folder_ / "hard");
  EXPECT_EQ(found("*").size(), 1U);
}

TEST_F(TextFiles, APathThatExistsIsNoGlob) {
  const auto file = folder_.write("a[1]*.txt", "text");
  EXPECT_EQ(find({file}), std::vector{file});
}

TEST_F(TextFiles, NoPatternsAreRefused) {
  EXPECT_EQ(config_key_of([] { find({}); }), "data.files");
}

TEST_F(TextFiles, AFileThatDoesNotExistIsRefusedWithTheDirectoryLookedIn) {
  expect_contains(message_of<DataError>([] { find({"no-such-file.txt"}); }),
                  {"data.files", "no such file", "'no-such-file.txt'", std::filesystem::current_path()});
}

TEST_F(TextFiles, AGlobWithoutMatchIsRefused) {
  const std::string file = folder_.write("a.md", "text"), pattern = folder_ / "*.txt";
  expect_contains(message_of<DataError>([&] { find({file, pattern}); }), {"no file matches", pattern});
}

TEST_F(TextFiles, WhatIsNoRegularFileIsRefusedWithTheReasonAndWithoutWaiting) {
  std::filesystem::create_directory(folder_ / "texts");
  for (const auto* pattern : {"texts", "*"}) expect_refused(pattern, "texts", "is a directory");
  std::filesystem::create_symlink("nowhere", folder_ / "dangling");
  expect_refused("dang*", "dangling", "symbolic link to a file that does not exist");
  std::filesystem::create_symlink("self", folder_ / "self");
  expect_refused("self", "self", "symbolic links");
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  expect_refused("fifo", "fifo", "regular file");
}

TEST(TextDocuments, AreReadByteByByte) {
  const TemporaryFolder folder;
  std::string text(100'000, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31);
  const std::vector paths = {folder.write("binary", text)};
  const auto documents = read_documents(paths);
  ASSERT_EQ(documents.size(), 1U);
  EXPECT_EQ(documents[0].text, text);
  EXPECT_EQ(documents[0].path, paths[0]);
}

TEST(TextDocuments, AFileWhoseSizeIsNotKnownBeforehandIsReadToItsEnd) {
  const std::vector<std::string> paths = {"/proc/self/status"};  // The kernel states a size of 0.
  expect_contains(read_documents(paths)[0].text, {"VmPeak", "nonvoluntary_ctxt_switches"});
}

TEST(TextDocuments, OfTheSameContentAreKeptOnce) {
  const TemporaryFolder folder;
  const std::vector paths = {folder.write("a", "same"), folder.write("b", "other"),
                             folder.write("c", "same")};
  EXPECT_EQ(paths_of(read_documents(paths)), (std::set{paths[0], paths[1]}));
}

TEST(TextDocuments, AFileThatIsEmptyOrCannotBeReadIsRefusedWithTheReason) {
  const TemporaryFolder folder;
  const std::pair<std::string, std::string> refused[] = {
      {folder.write("nothing.txt", ""), "is empty"},
      {"/proc/self/mem", "cannot be read"},  // Can be opened; nothing is mapped at 0.
      {"/no/such/file", "cannot be opened"}};
  for (const auto& [path, why] : refused) {
    const std::vector paths = {path};
    expect_contains(message_of<DataError>([&] { read_documents(paths); }), {path, why});
  }
}

TEST(HoldOut, EveryDocumentIsOnOneSide) {
  const auto documents = make_documents(40, [](int k) { return 100 + 37 * k; });
  for (const double share : {0.01, 0.1, 0.5, 0.9, 0.99}) {
    const auto corpus = hold_out(documents, share);
    auto both = paths_of(corpus.training);
    for (const auto& path : paths_of(corpus.held_out)) EXPECT_TRUE(both.insert(path).second) << path;
    EXPECT_EQ(both, paths_of(documents));
    EXPECT_EQ(total_bytes(corpus.training) + total_bytes(corpus.held_out), total_bytes(documents));
  }
}

TEST(HoldOut, MissesTheShareByAtMostHalfOfTheSmallestDocumentLeft) {
  const auto documents = make_documents(25, [](int k) { return 50 + (k * 7919) % 1000; });
  for (int percent = 5; percent < 95; percent += 5) {
    const auto corpus = hold_out(documents, percent / 100.0);
    const double goal = static_cast<double>(total_bytes(documents)) * percent / 100.0;
    std::size_t smallest = SIZE_MAX;
    for (const auto& document : corpus.training) smallest = std::min(smallest, document.text.size());
    EXPECT_LE(std::abs(static_cast<double>(total_bytes(corpus.held_out)) - goal),
              static_cast<double>(smallest) / 2 + 1)
        << percent;
  }
}

TEST(HoldOut, AtLeastOneDocumentIsOnEitherSide) {
  const auto documents = make_documents(2, [](int k) { return 100 + 900 * k; });
  for (const double share : {0.0001, 0.5, 0.9999}) {
    const auto corpus = hold_out(documents, share);
    EXPECT_EQ(corpus.training.size(), 1U) << share;
    EXPECT_EQ(corpus.held_out.size(), 1U) << share;
  }
}

TEST(HoldOut, TheChoiceDependsOnContentsAlone) {
  auto documents = make_documents(30, [](int k) { return 100 + 10 * (k % 7); });
  const auto texts = [](const TextCorpus& corpus) {
    std::set<std::string> held_out;
    for (const auto& document : corpus.held_out) held_out.insert(document.text);
    return held_out;
  };
  const auto expected = texts(hold_out(documents, 0.2));
  std::reverse(documents.begin(), documents.end());
  for (auto& document : documents)
    document.path = fmt::format("elsewhere/{}{}", document.text.size(), document.path);
  EXPECT_EQ(texts(hold_out(documents, 0.2)), expected);
}

TEST(HoldOut, ASingleDocumentIsRefused) {
  expect_contains(message_of<DataError>([] {
                    hold_out({{"only.txt", "text"}}, 0.1);
                  }),
                  {"data.held_out is 0.1", "only one document", "only.txt"});
}

TEST(TextCorpus, CopiesOfOneTextAreNeverOnBothSides) {
  const TemporaryFolder folder;
  for (int k = 0; k < 6; ++k) folder.write(fmt::format("copy{}", k), "the same text");
  EXPECT_THROW(read_corpus(std::vector<std::string>{folder / "*"}, 0.3),
               DataError);  // All copies are one document.
  folder.write("another", "another text!");
  const auto corpus = read_corpus(std::vector<std::string>{folder / "*"}, 0.3);
  ASSERT_EQ(corpus.training.size(), 1U);
  ASSERT_EQ(corpus.held_out.size(), 1U);
  EXPECT_NE(corpus.training[0].text, corpus.held_out[0].text);
}

TEST(TextCorpus, AShareOutsideZeroToOneIsRefused) {
  for (const double share : {-0.1, 1.0, 2.0, std::nan("")}) {
    const auto read = [&] { read_corpus(std::vector<std::string>{"/proc/self/status"}, share); };
    EXPECT_EQ(config_key_of(read), "data.held_out");
  }
}

// configs/gpt-licenses.yaml trains on these files.
TEST(TextCorpus, TheLicencesOfDebianAreReadOnceEach) {
  const std::filesystem::path licences = "/usr/share/common-licenses";
  if (!std::filesystem::exists(licences / "GPL-3")) GTEST_SKIP() << "not a Debian system";
  const auto corpus = read_corpus(std::vector<std::string>{licences / "*"}, 0.1);
  auto read = paths_of(corpus.training);
  read.merge(paths_of(corpus.held_out));
  std::set<std::string> real;
  for (const auto& entry : std::filesystem::directory_iterator(licences)) {
    real.insert(std::filesystem::canonical(entry.path()));
  }
  EXPECT_EQ(read, real);
  const auto held_out = static_cast<double>(total_bytes(corpus.held_out));
  EXPECT_NEAR(held_out / (held_out + static_cast<double>(total_bytes(corpus.training))), 0.1, 0.02);
}

}  // namespace
}  // namespace accelmgr::data
