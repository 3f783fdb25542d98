#include "engine/session/session.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/views.hpp"
#include "message_of.hpp"
#include "refusal.hpp"
#include "session_support.hpp"

namespace accelmgr::session {
namespace {

TEST(Session, RegionsAreAlignedAndDoNotOverlap) {
  Header h{};
  plan_layout({.ranks = 3,
               .bytes = {.parameters = 4 << 20,
                         .gradients = 3 << 20,
                         .gradient_room = 5 << 20,
                         .slab = 1 << 20,
                         .slab_room = 2 << 20},
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
      {h.unfrozen, 7 * sizeof(std::uint32_t)},
      {h.copies, 2 * h.copy_bytes},
      {h.undo, 3 * chunk_bytes},
      {h.queues, 3 * h.queue_bytes},
      {h.spans, span_rings(3) * sizeof(SpanRing)},
      {h.parameters, h.bytes.parameters},
      {h.gradients, h.bytes.gradient_room}};
  std::uint64_t end = 0;
  for (const auto& [offset, bytes] : regions) {
    EXPECT_EQ(offset % region_alignment, 0u);
    EXPECT_GE(offset, end);
    end = offset + bytes;
  }
  EXPECT_LE(end, h.total_bytes);
  EXPECT_GE(h.slab_data_offset, 7 * sizeof(Tag));
  EXPECT_LE(h.slab_data_offset + h.bytes.slab_room, h.slab_bytes);
  EXPECT_EQ(h.parameters % big_region_alignment, 0u);
  EXPECT_EQ(h.gradients % big_region_alignment, 0u);
}

TEST(Session, TheRoomForGradientsOfFrozenParametersTakesNoMemoryUntilItIsAllocated) {
  constexpr std::uint64_t count = 4 << 20;
  Manifest manifest;
  for (const auto group : {Group::decay, Group::frozen, Group::frozen})
    manifest.tensors.push_back(tensor_of(count, DType::bfloat16, group));
  manifest.set_precision({.float32_gradients = true});
  auto s = session_of(manifest, 2);
  const auto& last = manifest.tensors[2];
  const auto of_session = [&] { return allocated_bytes(s.fds()[0]); };
  const auto of_slab = [&](int rank) { return allocated_bytes(s.fds()[std::size_t(1 + rank)]); };
  const auto before = of_session(), slab_before = of_slab(0);
  EXPECT_LT(before, s.header().total_bytes - last.gradient_bytes());
  EXPECT_LT(slab_before, s.header().slab_bytes - last.slab_bytes());
  EXPECT_LE(before + 2 * slab_before, s.used_bytes(2) + 3 * big_region_alignment);
  auto attached = Session::attach(descriptors_of(s), 0);
  attached.populate_for(0, 3);
  EXPECT_EQ(of_session(), before) << "a runner touches none of it";
  EXPECT_EQ(of_slab(0), slab_before);

  s.allocate_room(last.gradient, last.gradient_bytes(), last.slab, last.slab_bytes(), 1);
  EXPECT_GE(of_session(), before + last.gradient_bytes());
  EXPECT_LT(of_session(), before + 2 * last.gradient_bytes());
  EXPECT_GE(of_slab(0), slab_before + last.slab_bytes());
  EXPECT_EQ(of_slab(1), slab_before) << "rank 1 is not of the team";
}

TEST(Session, MemoryBeyondTheLimitIsRefusedWithBothNumbers) {
  EXPECT_TRUE(test::says(test::message_of<SessionError>([] { check_memory(5000, 4000); }), {"5000", "4000"}));
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
  EXPECT_EQ(s.control().parameter_version.load(), 10u) << "it may have written them without saying so";
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
  auto other = Session::attach(descriptors_of(s));
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
  auto attached = Session::attach(descriptors_of(made), 0, true);
  slab_of(attached, 0)[0] = 1;
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(attached.parameters()) = 1, "");
  EXPECT_DEATH(*reinterpret_cast<volatile float*>(attached.slab(1)) = 1, "");
}

TEST(Counters, AreReadAgainIfAnAttemptBeganMeanwhile) {
  auto [manifest, s] = small_session(1, {1});
  s.counters(s.word().index).elements = 5;
  int reads = 0;
  const auto elements = read_counters(s, [&, &s = s](const Counters& valid) {
    const std::uint64_t found = valid.elements;
    if (++reads == 1) {
      s.counters(s.word().index).elements = 6;
      EXPECT_GT(open_attempt(s, {.participants = all_ranks(1)}), 0u);
    }
    return found;
  });
  EXPECT_EQ(reads, 2);
  EXPECT_EQ(elements, 6u);
}

}  // namespace
}  // namespace accelmgr::session
