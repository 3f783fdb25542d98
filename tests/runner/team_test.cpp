// Teams of devices in a session, with the fakes of CUDA and NCCL: from gradients on devices through shards in
// slabs to the master, beside ranks that contribute all they have. Values are small whole numbers, so that
// sums are exact.
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <thread>

#include "device/gradient_copies.hpp"
#include "runner/gradients.hpp"
#include "session/attempt.hpp"
#include "session/reduction.hpp"
#include "support/fake_nccl.hpp"

namespace accelmgr::test {
namespace {

using session::RankMask;

/// What a Runner is to its replica.
class RankSink final : public replica::Sink {
 public:
  RankSink(session::Session& session, int rank, const session::Manifest& manifest)
      : view(session, rank), gradients(view, manifest) {}
  void capture(std::size_t index, const void* gradient) override { gradients.capture(index, gradient); }
  std::span<std::byte> slab() override { return gradients.slab(); }
  std::byte* place_of(std::size_t index) override { return gradients.place_of(index); }
  void arrived(std::size_t index) override { gradients.arrived(index); }
  void shard(RankMask team, std::uint64_t first, std::uint64_t count, const void* sums) override {
    gradients.shard(first, count, sums);
    view.record().ballot.team = team;
  }
  void backward_begins() override {}
  bool last_micro_batch() override { return true; }
  bool wanted() override { return true; }

  session::RunnerView view;
  runner::Gradients gradients;
};

struct Tensor {
  std::uint64_t count;
  session::Group group;
};

/// A session of five ranks: 0, 2 and 3 are a team of devices, 4 is a device that is alone, 1 is a CPU.
class Mixed {
 public:
  static constexpr int ranks = 5;
  static constexpr RankMask team = 0b01101;

  explicit Mixed(session::SlabElement slab) : session_(make_session(slab)) {}

  /// Returns the names of gradients that were not finite, for each rank.
  std::vector<std::vector<std::string>> step(bool accumulate, std::optional<int> broken = {}) {
    const auto attempt = session::open_attempt(session_, {.participants = session::all_ranks(ranks),
                                                          .accumulate = accumulate,
                                                          .shares = session::even_shares(1)});
    id_ = device::DeviceCollectives::make_id(FakeNccl::table());
    std::vector<std::vector<std::string>> nonfinite(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back(
          [&, rank] { nonfinite[std::size_t(rank)] = compute(rank, attempt, rank == broken); });
    for (auto& thread : threads) thread.join();
    const session::Reduction reduction(session_, manifest_);
    for (int rank = 0; rank < ranks; ++rank) reduction.finish_slice(rank, attempt);
    EXPECT_TRUE(session::close_if_over(session_, attempt));
    return nonfinite;
  }

  static float value(int rank, std::size_t tensor, std::uint64_t i) {
    return float((i + tensor * 3 + std::uint64_t(rank) * 5) % 8);
  }
  static bool used(int rank, std::size_t tensor) { return (std::size_t(rank) + tensor) % 3 != 0; }

  void check(float times) const {
    const auto* master = reinterpret_cast<const float*>(session_.gradients());
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t)
      for (std::uint64_t i = 0; i < manifest_.tensors[t].count; ++i) {
        float sum = 0;
        for (int rank = 0; rank < ranks; ++rank) sum += used(rank, t) ? value(rank, t, i) : 0;
        ASSERT_EQ(master[manifest_.tensors[t].first + i], sum * times) << "tensor " << t << ", element " << i;
      }
  }

 private:
  session::Session make_session(session::SlabElement slab) {
    for (const auto& [count, group] : std::initializer_list<Tensor>{{270'000, session::Group::decay},
                                                                    {7, session::Group::no_decay},
                                                                    {9000, session::Group::decay},
                                                                    {300'000, session::Group::decay},
                                                                    {65, session::Group::no_decay}})
      manifest_.tensors.push_back({.name = "p" + std::to_string(manifest_.tensors.size()),
                                   .aliases = {},
                                   .shape = {static_cast<std::int64_t>(count)},
                                   .count = count,
                                   .group = group});
    session::Extent extent{.ranks = ranks, .slab_element = slab};
    extent.elements = manifest_.place_tensors(extent.element);
    extent.tensors = manifest_.tensors.size();
    extent.manifest_bytes = session::manifest_bytes(manifest_);
    return session::Session::create(extent, extent.ranks, 1);
  }

  std::vector<std::string> compute(int rank, std::uint64_t attempt, bool broken) {
    RankSink sink(session_, rank, manifest_);
    session::Reduction(sink.view, manifest_).reset_cursor(rank, attempt);
    sink.view.record().ballot = {};
    sink.view.record().ballot.micro_batches = 1;
    sink.gradients.begin(attempt);
    if (rank == 1) {
      std::vector<float> gradient;
      for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
        if (!used(rank, t)) continue;
        gradient.resize(manifest_.tensors[t].count);
        for (std::uint64_t i = 0; i < gradient.size(); ++i) gradient[i] = value(rank, t, i);
        sink.capture(t, gradient.data());
      }
    } else {
      compute_on_device(rank, sink, broken);
    }
    session::cast_vote(sink.view, attempt);
    return sink.gradients.nonfinite();
  }

  void compute_on_device(int rank, RankSink& sink, bool broken) {
    device::Device device(FakeCuda::runtime(), rank);
    const auto compute = device.make_stream();
    std::optional<device::DeviceCollectives> collectives;
    std::vector<device::Memory> gradients;
    device::GradientCopies copies(device, manifest_, session::Element::f32, sink, compute.get(), 30);
    if ((team >> rank & 1) != 0) {
      const int position = __builtin_popcount(team & ((RankMask{1} << rank) - 1));
      collectives.emplace(device, FakeNccl::table(), id_, position, __builtin_popcount(team), sink, 30);
      EXPECT_TRUE(collectives->connect());
      copies.join(*collectives, team);
    }
    copies.begin_attempt();
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
      const auto count = manifest_.tensors[t].count;
      auto* to =
          reinterpret_cast<float*>(gradients.emplace_back(device.allocate(count * sizeof(float))).get());
      if (!used(rank, t)) continue;
      cuda_.launch(compute.get(), [=] {
        for (std::uint64_t i = 0; i < count; ++i) to[i] = value(rank, t, i);
        if (broken) to[count - 1] = std::numeric_limits<float>::infinity();
      });
      copies.written(t, gradients.back().get());
    }
    EXPECT_TRUE(copies.finish());
    copies.leave();
  }

  session::Manifest manifest_;
  session::Session session_;
  device::NcclId id_{};
  FakeCuda cuda_{FakeCuda::Execution::threads};
  FakeNccl nccl_{cuda_};
};

TEST(Team, AddsItsSumToWhatOthersHaveInTheSameSession) {
  for (const auto slab : {session::SlabElement::same, session::SlabElement::bf16}) {
    Mixed mixed(slab);
    mixed.step(false);
    mixed.check(1);
    mixed.step(true);
    mixed.check(2);
    mixed.step(false);
    mixed.check(1);
  }
}

// The holder of the shard sees it, whoever had it.
TEST(Team, NamesAGradientThatIsNotFinite) {
  Mixed mixed(session::SlabElement::same);
  const auto names = mixed.step(false, 2);  // Rank 2 uses tensors 0, 2 and 3; the last shard is rank 3's.
  EXPECT_EQ(names[2], std::vector<std::string>{});
  EXPECT_EQ(names[3], (std::vector<std::string>{"p3", "p0", "p2"}));
}

}  // namespace
}  // namespace accelmgr::test
