#include "engine/device/parameter_upload.hpp"

#include <gtest/gtest.h>

#include "rig.hpp"

namespace accelmgr::test {
namespace {

/// Ranges in an array of pages of 100 bytes, as pairs of begin and end.
using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

Ranges merged(const Ranges& ranges) {
  auto* const base = reinterpret_cast<std::byte*>(std::uintptr_t{100'000});
  std::vector<std::span<std::byte>> spans;
  for (const auto& [begin, end] : ranges) spans.emplace_back(base + begin, end - begin);
  Ranges result;
  for (const auto& span : device::merge_pages(spans, 100))
    result.emplace_back(span.data() - base, span.data() + span.size() - base);
  return result;
}

TEST(MergedPages, AreOneRangeWherePagesTouchAndStayApartWhereAPageLiesBetween) {
  EXPECT_EQ(merged({{210, 220}, {0, 150}}), (Ranges{{0, 220}})) << "in any order";
  EXPECT_EQ(merged({{0, 400}, {100, 200}}), (Ranges{{0, 400}}));
  EXPECT_EQ(merged({{0, 150}, {310, 320}}), (Ranges{{0, 150}, {310, 320}}));
  EXPECT_EQ(merged({{0, 150}, {160, 160}}), (Ranges{{0, 150}})) << "nothing is registered for nothing";
}

TEST(ParameterUpload, ReturnsBeforeItIsDone) {
  Rig rig({.execution = FakeCuda::Execution::stepped});
  rig.begin(3);
  EXPECT_NE(*Rig::floats(rig.parameters[0]), 3.0F) << "nothing is executed until the host waits";
}

TEST(ParameterUpload, LeavesOutWhatTheSinkSaysIsNotStaleAndNothingElse) {
  Rig rig({.counts = {3000, 17, 400}, .is_mixed = true});
  constexpr std::size_t frozen = 8, of_int8 = 3;
  const auto bytes = rig.manifest.tensors[of_int8].bytes();
  std::fill_n(rig.places[of_int8].data, bytes, std::byte{7});
  for (const float value : {2.0F, 5.0F}) {
    rig.begin(value);
    ASSERT_TRUE(rig.copies->finish());
    rig.sink.fresh = {frozen};
  }
  for (std::size_t i = 0; i < rig.size(); ++i)
    if (i != of_int8) {
      EXPECT_EQ(rig.elements(rig.parameters[i].get(), i).numbers(), rig.expected(i, i == frozen ? 2 : 5))
          << i;
    }
  EXPECT_EQ(std::memcmp(rig.parameters[of_int8].get(), rig.places[of_int8].data, bytes), 0);
}

TEST(ParameterUpload, SaysThatTheReplicaIsBuiltBeforeItRegistersPagesAndDoesWithoutThem) {
  Rig rig({});
  int built = 0;
  rig.sink.when_built = [&] {
    ++built;
    rig.fake.fail("cudaHostRegister", 1, device::code::invalid_value);
  };
  rig.upload.reset();
  std::vector<std::byte*> targets;
  for (const auto& parameter : rig.parameters) targets.push_back(parameter.get());
  rig.upload.emplace(rig.device, rig.sink.binding(rig.manifest, rig.places), targets, rig.compute.get());
  EXPECT_EQ(built, 1);
  rig.begin(4);
  rig.micro_batch(0, true, true);
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.sink.seen[0], rig.expected(0, 4));
  EXPECT_EQ(rig.fake.unregistered_copies(), int(rig.size())) << "it was registered before";
}

}  // namespace
}  // namespace accelmgr::test
