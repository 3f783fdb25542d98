#include "session/session.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "session/views.hpp"
#include "session_support.hpp"

namespace accelmgr::session {
namespace {

std::vector<base::UniqueFd> duplicates(Session& session) {
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
      {h.history, sizeof(StepHistory)},
      {h.manifest, h.manifest_bytes},
      {h.copies, 2 * h.copy_bytes},
      {h.undo, 3 * chunk_bytes},
      {h.queues, 3 * h.queue_bytes},
      {h.spans, span_rings(3) * sizeof(SpanRing)},
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
  auto attached = Session::attach(duplicates(made));
  EXPECT_NE(attached.gradients(), made.gradients());
  EXPECT_EQ(gradients_of(attached)[999], 3.5f);
  EXPECT_EQ(slab_of(attached, 1)[5], -1.0f);
  EXPECT_EQ(attached.word(), StepWord{});
}

TEST(Session, ManifestReadsBackFromAnotherMapping) {
  Manifest manifest;
  manifest.tensors = {{.name = "w0",
                       .aliases = {"tied.a", "a name of more than fifteen characters"},
                       .shape = {2, 3},
                       .count = 6},
                      {.name = "w1", .aliases = {}, .shape = {3}, .count = 3, .group = Group::frozen},
                      {.name = "w0.diagonal",
                       .aliases = {},
                       .shape = {2},
                       .count = 2,
                       .shares = 0,
                       .shared_offset = 0,
                       .strides = {4}}};
  manifest.buffers = {{.name = "mean", .shape = {2}, .bytes = 8},
                      {.name = "batches",
                       .aliases = {"count"},
                       .shape = {},
                       .dtype = DType::int64,
                       .bytes = 8,
                       .persistent = false}};
  manifest.fields = {{.name = "input", .shape = {128}, .dtype = DType::int64, .element_bytes = 1024},
                     {.name = "target", .shape = {}, .dtype = DType::uint8, .element_bytes = 1}};
  auto made = session_of(manifest, 2);
  const auto read = read_manifest(Session::attach(duplicates(made)));
  ASSERT_EQ(read.tensors.size(), 3u);
  EXPECT_EQ(read.tensors[0].name, "w0");
  EXPECT_EQ(read.tensors[0].aliases, manifest.tensors[0].aliases);
  EXPECT_EQ(read.tensors[0].shape, manifest.tensors[0].shape);
  EXPECT_EQ(read.tensors[1].first, manifest.tensors[1].first);
  EXPECT_EQ(read.tensors[1].group, Group::frozen);
  EXPECT_EQ(read.tensors[1].shares, -1);
  EXPECT_EQ(read.tensors[2].shares, 0);
  EXPECT_EQ(read.tensors[2].strides, manifest.tensors[2].strides);
  EXPECT_EQ(read.buffers[1].name, "batches");
  EXPECT_EQ(read.buffers[1].aliases.at(0), "count");
  EXPECT_EQ(read.buffers[1].dtype, DType::int64);
  EXPECT_FALSE(read.buffers[1].persistent);
  EXPECT_TRUE(read.buffers[0].persistent);
  EXPECT_EQ(read.fields.at(0).element_bytes, 1024u);
  EXPECT_EQ(read.fields.at(1).offset, manifest.fields[1].offset);
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

TEST(Session, WhatAHostLeavesHalfWrittenIsEndedAndSaid) {
  auto [manifest, s] = small_session(2, {10});
  s.control().parameter_version.store(7);
  s.control().buffer_version.store(4);
  const auto half = SupervisorView(s).settle_host();
  EXPECT_TRUE(half.parameters);
  EXPECT_FALSE(half.buffers);
  EXPECT_EQ(s.control().parameter_version.load(), 8u);  // Another one than before: it is loaded.
  EXPECT_EQ(s.control().buffer_version.load(), 4u);
  EXPECT_FALSE(SupervisorView(s).settle_host().parameters);
}

TEST(Session, WhatAHostMayHaveWrittenWithoutSayingSoIsAnotherVersion) {
  auto [manifest, s] = small_session(1, {10});
  s.control().parameter_version.store(4);
  EXPECT_FALSE(SupervisorView(s).settle_host().parameters);
  EXPECT_EQ(s.control().parameter_version.load(), 6u);
}

TEST(Session, ARequestToTheLoaderThatWasNotCompleteIsTakenBack) {
  auto [manifest, s] = small_session(2, {10});
  s.sharding().assigned_to.store(3);
  s.sharding().shares = even_shares(2);
  s.sharding().follows.store(1);
  s.control().assignments.store(1);
  s.control().assignment = {1, even_shares(2)};  // The host died before it advanced `assignments`.
  SupervisorView(s).settle_host();
  EXPECT_EQ(s.control().assignment, (Assignment{3, even_shares(2)}));

  s.control().assignments.store(2);  // The loader has not followed yet.
  s.control().assignment = {1, even_shares(2)};
  SupervisorView(s).settle_host();
  EXPECT_EQ(s.control().assignment, (Assignment{1, even_shares(2)}));
}

TEST(Session, APrivateSessionNeitherSeesNorMakesChanges) {
  auto [manifest, s] = small_session(1, {10});
  auto other = Session::attach(duplicates(s));
  s.parameters()[0] = std::byte{1};
  auto* const address = other.parameters();
  EXPECT_TRUE(other.make_private());
  EXPECT_EQ(other.parameters(), address);
  EXPECT_EQ(other.parameters()[0], std::byte{1});
  s.parameters()[0] = std::byte{2};
  EXPECT_EQ(other.parameters()[0], std::byte{1});
  other.parameters()[0] = std::byte{3};
  EXPECT_EQ(s.parameters()[0], std::byte{2});
  EXPECT_TRUE(other.fds().empty());
  EXPECT_EQ(other.slab(0)[0], std::byte{0});
}

// A private copy of it would end the process later, by the kernel's choice.
TEST(MappingDeathTest, WithoutMemoryForACopyCanOnlyBeRead) {
  const auto bytes = ipc::memory_available().bytes + (std::size_t{1} << 30);
  const auto fd = ipc::create_memfd("test", bytes, ipc::Allocate::later);
  const ipc::Mapping shared(fd.get(), 0, bytes, ipc::Access::read_write);
  const ipc::Mapping mapping(fd.get(), 0, bytes, ipc::Access::read_write);
  EXPECT_TRUE(mapping.make_private());
  shared.data()[0] = std::byte{7};
  EXPECT_EQ(mapping.data()[0], std::byte{7});
  EXPECT_DEATH(mapping.data()[0] = std::byte{8}, "");
}

TEST(SessionDeathTest, AnObserverReadsAndCannotWrite) {
  auto [manifest, made] = small_session(2, {10});
  made.parameters()[0] = std::byte{7};
  auto observed = Session::observe(ipc::open_read_only(made.fds()[0]));
  EXPECT_EQ(observed.parameters()[0], std::byte{7});
  EXPECT_EQ(read_manifest(observed).tensors.size(), manifest.tensors.size());
  EXPECT_TRUE(observed.fds().empty());
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(observed.parameters()) = 1, "");
}

TEST(SessionDeathTest, ProtectedParametersCannotBeWritten) {
  auto [manifest, made] = small_session(2, {10});
  auto attached = Session::attach(duplicates(made), 0, true);
  slab_of(attached, 0)[0] = 1;
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(attached.parameters()) = 1, "");
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(attached.slab(1)) = 1, "");
}

}  // namespace
}  // namespace accelmgr::session
