#include "session/session.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "session_support.hpp"

namespace accelmgr::session {
namespace {

std::vector<base::UniqueFd> duplicates(const Session& session) {
  std::vector<base::UniqueFd> out;
  for (int fd : session.fds()) out.emplace_back(dup(fd));
  return out;
}

TEST(Session, RegionsAreAlignedAndDoNotOverlap) {
  Header h{};
  plan_layout({.ranks = 3,
               .elements = 1 << 20,
               .tensors = 7,
               .buffer_bytes = 100,
               .manifest_bytes = 4096,
               .slots = 3,
               .slot_bytes = 1000},
              h);
  const std::vector<std::pair<std::uint64_t, std::uint64_t>> regions{
      {0, sizeof(Header)},
      {h.control, sizeof(Control)},
      {h.records, sizeof(RankRecord) * max_ranks},
      {h.manifest, h.manifest_bytes},
      {h.copies, 2 * h.copy_bytes},
      {h.undo, 3 * chunk_bytes},
      {h.queues, 3 * h.queue_bytes},
      {h.parameters, h.elements * 4},
      {h.gradients, h.elements * 4}};
  std::uint64_t end = 0;
  for (const auto& [offset, bytes] : regions) {
    EXPECT_EQ(offset % region_alignment, 0u);
    EXPECT_GE(offset, end);
    end = offset + bytes;
  }
  EXPECT_LE(end, h.total_bytes);
  EXPECT_EQ(h.parameters % big_region_alignment, 0u);
  EXPECT_EQ(h.gradients % big_region_alignment, 0u);
}

TEST(Session, CopiesOfStateDoNotOverlap) {
  auto [manifest, s] = small_session(2, {10});
  const auto bytes = s.header().buffer_bytes;
  for (std::uint32_t index : {0u, 1u}) {
    EXPECT_GE(s.generator(index, 0), reinterpret_cast<std::byte*>(&s.counters(index) + 1));
    EXPECT_EQ(s.generator(index, 1) - s.generator(index, 0), static_cast<std::ptrdiff_t>(generator_bytes));
    EXPECT_EQ(s.buffers(index, 0) - s.generator(index, 1), static_cast<std::ptrdiff_t>(generator_bytes));
    EXPECT_EQ(s.result_buffers(index) - s.buffers(index, 1), static_cast<std::ptrdiff_t>(bytes));
  }
  EXPECT_EQ(reinterpret_cast<std::byte*>(&s.counters(1)) - s.result_buffers(0),
            static_cast<std::ptrdiff_t>(bytes));
}

TEST(Session, AttachingSeesWhatTheMakerWrote) {
  auto [manifest, made] = small_session(2, {1000});
  gradients_of(made)[999] = 3.5f;
  slab_of(made, 1)[5] = -1.0f;
  const auto attached = Session::attach(duplicates(made));
  EXPECT_NE(attached.gradients(), made.gradients());
  EXPECT_EQ(gradients_of(attached)[999], 3.5f);
  EXPECT_EQ(slab_of(attached, 1)[5], -1.0f);
  EXPECT_EQ(attached.word(), StepWord{});
}

TEST(Session, ManifestReadsBackFromAnotherMapping) {
  auto [manifest, made] = small_session(2, {6, 3});
  manifest.tensors[0].aliases = {"tied.a", "a name of more than fifteen characters"};
  manifest.tensors[0].shape = {2, 3};
  manifest.tensors[1].group = Group::frozen;
  manifest.fields.push_back(
      {.name = "input", .shape = {128}, .dtype = 4, .offset = 64, .element_bytes = 1024});
  write_manifest(manifest, made.manifest());
  const auto attached = Session::attach(duplicates(made));
  const auto read = read_manifest(attached.manifest());
  ASSERT_EQ(read.tensors.size(), 2u);
  EXPECT_EQ(read.tensors[0].name, "w0");
  EXPECT_EQ(read.tensors[0].aliases, manifest.tensors[0].aliases);
  EXPECT_EQ(read.tensors[0].shape, manifest.tensors[0].shape);
  EXPECT_EQ(read.tensors[1].first, manifest.tensors[1].first);
  EXPECT_EQ(read.tensors[1].group, Group::frozen);
  EXPECT_EQ(read.buffers[1].name, "batches");
  EXPECT_EQ(read.buffers[1].dtype, 4);
  EXPECT_EQ(read.fields.at(0).element_bytes, 1024u);
}

TEST(Session, GroupsLieNextToEachOther) {
  Manifest m;
  for (auto group : {Group::frozen, Group::no_decay, Group::decay, Group::no_decay})
    m.tensors.push_back({.name = "t", .aliases = {}, .shape = {5}, .first = 0, .count = 5, .group = group});
  EXPECT_EQ(m.place_tensors(Element::f32), 64u);
  EXPECT_EQ(m.tensors[2].first, 0u);
  EXPECT_EQ(m.tensors[1].first, 16u);
  EXPECT_EQ(m.tensors[3].first, 32u);
  EXPECT_EQ(m.tensors[0].first, 48u);
}

TEST(Session, AStrangersMemoryIsRefused) {
  auto [manifest, made] = small_session(1, {10});
  auto fds = duplicates(made);
  auto wrong = ipc::create_memfd("not-a-session", 8192);
  fds[0] = std::move(wrong);
  EXPECT_THROW(Session::attach(std::move(fds)), SessionError);
  auto few = duplicates(made);
  few.pop_back();
  EXPECT_THROW(Session::attach(std::move(few)), SessionError);
}

TEST(Session, MemoryBeyondTheLimitIsRefusedWithBothNumbers) {
  try {
    check_memory(5000, 4000);
    FAIL() << "5000 bytes of 4000 were allowed";
  } catch (const SessionError& error) {
    EXPECT_NE(std::string(error.what()).find("5000"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("4000"), std::string::npos);
  }
  EXPECT_THROW(check_memory(std::uint64_t{1} << 60, 0), SessionError);
  EXPECT_NO_THROW(check_memory(4096, 4096));
  EXPECT_NO_THROW(check_memory(std::uint64_t{1} << 60, 0, 4096)) << "what it has already";
  EXPECT_THROW(check_memory(5000, 4000, 1), SessionError);
}

TEST(SessionDeathTest, ProtectedParametersCannotBeWritten) {
  auto [manifest, made] = small_session(2, {10});
  const auto attached = Session::attach(duplicates(made), 0, true);
  slab_of(attached, 0)[0] = 1;
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(attached.parameters()) = 1, "");
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(attached.slab(1)) = 1, "");
}

}  // namespace
}  // namespace accelmgr::session
