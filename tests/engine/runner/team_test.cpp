// Teams of devices in a session, with the fakes of CUDA and NCCL: from gradients on devices through shards in
// slabs to the master, beside ranks that contribute all they have. Values are small whole numbers, so that
// sums are exact.
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <thread>

#include "elements.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/runner/gradients.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session_support.hpp"
#include "engine/support/fake_nccl.hpp"
#include "engine/support/runner_side.hpp"

namespace accelmgr::test {
namespace {

using session::RankMask;

/// What a Runner is to its replica.
class RankSink final : public RunnerSide {
 public:
  RankSink(session::Session& session, int rank, const session::Manifest& manifest)
      : view(session, rank), gradients(view, manifest) {}
  void capture(std::size_t index, const void* gradient) override { gradients.capture(index, gradient); }
  std::span<std::byte> slab() override { return gradients.slab(); }
  std::byte* place_of(std::size_t index) override { return gradients.place_of(index); }
  void arrived(std::span<const std::size_t> indices) override { gradients.arrived(indices); }
  bool is_trained(std::size_t index) override { return gradients.is_trained(index); }
  void shard(session::Bytes shard, const std::byte* sums) override { gradients.shard(shard, sums); }
  bool last_micro_batch() override { return true; }

  session::RunnerView view;
  runner::Gradients gradients;
};

/// A session of five ranks: 0, 2 and 3 are a team of devices, 4 is a device that is alone, 1 is a CPU.
class Mixed {
 public:
  static constexpr int ranks = 5;
  static constexpr RankMask team = 0b01101;

  explicit Mixed(session::Manifest manifest)
      : manifest_(std::move(manifest)), session_(session::session_of(manifest_, ranks)) {}

  void unfreeze(std::size_t tensor) {
    const auto& entry = manifest_.tensors[tensor];
    session_.allocate_room(entry.gradient, entry.gradient_bytes(), entry.slab, entry.slab_bytes(),
                           session::all_ranks(ranks));
    session_.control().unfrozen_bytes.fetch_add(entry.gradient_bytes());
    session_.unfrozen()[tensor].store(1);
  }

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

  static double value(int rank, std::size_t tensor, std::uint64_t i) {
    return double((i + tensor * 3 + std::uint64_t(rank) * 5) % 8);
  }
  bool used(int rank, std::size_t tensor) const {
    return session::has_gradient(session_, manifest_, tensor) && (std::size_t(rank) + tensor) % 3 != 0;
  }

  void check(double times) {
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
      const auto& entry = manifest_.tensors[t];
      if (!session::has_gradient(session_, manifest_, t)) continue;
      const auto master =
          Elements(session_.gradients() + entry.gradient, entry.types.master, entry.elements()).numbers();
      for (std::uint64_t i = 0; i < entry.elements(); ++i) {
        double sum = 0;
        for (int rank = 0; rank < ranks; ++rank) sum += used(rank, t) ? value(rank, t, i) : 0;
        ASSERT_EQ(master[i], sum * times) << "tensor " << t << ", element " << i;
      }
    }
  }

 private:
  std::vector<std::string> compute(int rank, std::uint64_t attempt, bool broken) {
    RankSink sink(session_, rank, manifest_);
    session::Reduction(sink.view, manifest_).reset_cursor(rank, attempt);
    sink.view.record().ballot = {};
    sink.view.record().ballot.micro_batches = 1;
    sink.gradients.begin(attempt);
    if (rank == 1) {
      for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
        if (!used(rank, t)) continue;
        std::vector<std::byte> gradient(gradient_bytes(t));
        compute_gradient(rank, t, gradient.data());
        sink.capture(t, gradient.data());
      }
    } else {
      compute_on_device(rank, sink, broken);
    }
    session::cast_vote(sink.view, attempt);
    return sink.gradients.nonfinite();
  }

  std::size_t gradient_bytes(std::size_t tensor) const {
    const auto& entry = manifest_.tensors[tensor];
    return entry.elements() * session::bytes_of(entry.types.gradient);
  }
  void compute_gradient(int rank, std::size_t tensor, std::byte* to) const {
    const auto& entry = manifest_.tensors[tensor];
    Elements(to, entry.types.gradient, entry.elements()).change([&](double, std::uint64_t i) {
      return value(rank, tensor, i);
    });
  }

  void compute_on_device(int rank, RankSink& sink, bool broken) {
    device::Device device(FakeCuda::runtime(), rank);
    const auto compute = device.make_stream();
    std::optional<device::DeviceCollectives> collectives;
    std::vector<device::Memory> gradients;
    device::GradientCopies copies(device, sink.binding(manifest_), compute.get(), 30);
    if ((team >> rank & 1) != 0) {
      const int position = __builtin_popcount(team & ((RankMask{1} << rank) - 1));
      collectives.emplace(device, FakeNccl::table(), id_, position, __builtin_popcount(team), sink, 30);
      EXPECT_TRUE(collectives->connect());
      copies.join(*collectives);
    }
    EXPECT_TRUE(copies.begin_attempt());
    copies.begin_work();
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
      auto* to = gradients.emplace_back(device.allocate(gradient_bytes(t))).get();
      if (!used(rank, t)) continue;
      cuda_.launch(compute.get(), [=, this] {
        compute_gradient(rank, t, to);
        const auto& entry = manifest_.tensors[t];
        if (broken)
          Elements(to, entry.types.gradient, entry.elements())
              .set(entry.elements() - 1, std::numeric_limits<double>::infinity());
      });
      if (copies.rounds(t)) {
        const auto* from = to;
        to = gradients.emplace_back(device.allocate(gradient_bytes(t))).get();
        cuda_.launch(compute.get(), [=, this] {
          const auto& entry = manifest_.tensors[t];
          session::best_kernels().capture_copy(to, from, entry.elements(), entry.types);
        });
      }
      copies.written(t, to);
    }
    EXPECT_TRUE(copies.finish());
    copies.leave();
  }

  session::Manifest manifest_;
  session::Session session_;
  device::NcclId id_{};
  FakeCuda cuda_{FakeCuda::Execution::threads};
  FakeNccl nccl_;
};

session::Manifest float32_manifest(bool bf16_slabs) {
  using session::Group;
  session::Manifest manifest;
  for (const auto& [count, group] : {std::pair{270'000u, Group::decay},
                                     {7u, Group::no_decay},
                                     {9000u, Group::decay},
                                     {300'000u, Group::decay},
                                     {65u, Group::no_decay}})
    manifest.tensors.push_back(
        session::tensor_of(count, DType::float32, group, "p" + std::to_string(manifest.tensors.size())));
  manifest.set_precision({.bf16_slabs = bf16_slabs});
  return manifest;
}

TEST(Team, AddsItsSumToWhatOthersHaveInTheSameSession) {
  for (const bool bf16_slabs : {false, true}) {
    Mixed mixed(float32_manifest(bf16_slabs));
    mixed.step(false);
    mixed.check(1);
    mixed.step(true);
    mixed.check(2);
    mixed.step(false);
    mixed.check(1);
  }
}

TEST(Team, AddsGradientsOfAllDtypesAndThoseOfAParameterThatIsUnfrozen) {
  for (const auto& precision :
       {session::Precision{}, session::Precision{.bf16_runners = true, .float32_gradients = true},
        session::Precision{.bf16_slabs = true}}) {
    Mixed mixed(mixed_manifest({3000, 5000, 17, 700}, precision));
    mixed.step(false);
    mixed.check(1);
    mixed.unfreeze(to_unfreeze);
    mixed.step(false);
    mixed.check(1);
    mixed.step(true);
    mixed.check(2);
  }
}

// The rank that holds the shard reports the value, whichever rank computed it.
TEST(Team, NamesAGradientThatIsNotFinite) {
  Mixed mixed(float32_manifest(false));
  const auto names = mixed.step(false, 2);  // Rank 2 uses tensors 0, 2 and 3; the last shard is rank 3's.
  EXPECT_EQ(names[2], std::vector<std::string>{});
  EXPECT_EQ(names[3], (std::vector<std::string>{"p3", "p0", "p2"}));
}

}  // namespace
}  // namespace accelmgr::test
