// Tests of a team of devices: each rank is a thread with a device, a slab and a manifest of its own, and the
// fakes sum up. Gradients are small whole numbers, so that sums are the same in any order.
#include "engine/device/gradient_shards.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "rig.hpp"
#include "team.hpp"

namespace accelmgr::test {
namespace {

constexpr std::size_t memory_bytes = std::size_t{2} << 20;
constexpr std::byte nothing{0xff};  // Elements of such bytes are NaN.

/// Three buckets of gradients, and one for the parameter that is frozen.
session::Manifest usual_manifest() {
  using enum session::Group;
  return float_manifest({3000, 5, 700, 40, 263'000, 33}, {decay, no_decay, decay, frozen, decay, no_decay});
}

/// The sink of one rank. Shards go to `shards`, at their place in the plan.
class ShardSink final : public SlabSink {
 public:
  ShardSink(const session::Manifest& manifest, bool has_slab) : SlabSink(manifest, has_slab, memory_bytes) {}

  void capture(std::size_t, const void*) override { ADD_FAILURE() << "a team gives shards only"; }
  void arrived(std::span<const std::size_t>) override { ADD_FAILURE() << "a team gives shards only"; }
  void shard(session::Bytes shard, const std::byte* sums) override {
    ++given;
    const bool in_place =
        has_slab_ && unfrozen.empty() && session::ShardPlan(manifest_).is_of_slabs(manifest_);
    EXPECT_EQ(in_place, has_slab_ && sums == slab().data() + shard.first);
    std::copy_n(sums, shard.count(), shards.begin() + std::ptrdiff_t(shard.first));
  }
  bool wanted() override { return wants; }

  std::vector<std::byte> shards = std::vector<std::byte>(memory_bytes, nothing);
  std::size_t given = 0;  ///< Shards.
  std::atomic<bool> wants = true;
};

double parameter_value(std::size_t attempt, std::size_t parameter, std::uint64_t element) {
  return double((element + parameter * 5 + attempt * 3) % 7);
}

/// One rank of a team with parameters and gradients.
struct TeamRank {
  TeamRank(Team& team, int rank, const session::Manifest& manifest, bool has_slab = true,
           double timeout_s = 30)
      : fakes(team),
        manifest(manifest),
        sink(manifest, has_slab),
        device(FakeCuda::runtime(), rank),
        collectives(device, FakeNccl::table(), team.id, rank, team.size(), sink, timeout_s) {
    std::vector<std::byte*> targets;
    for (const auto& entry : manifest.tensors) {
      places.push_back({master.span().data() + entry.offset, {1}});
      const auto bytes = entry.count * size_of(entry.runner_dtype);
      targets.push_back(parameters.emplace_back(device.allocate(bytes)).get());
      gradients.push_back(device.allocate(bytes));
      complete.push_back(device.make_event());
    }
    upload.emplace(device, sink.binding(manifest, places), targets, compute.get());
    copies.emplace(device, sink.binding(manifest), compute.get(), timeout_s);
  }

  int rank() const { return collectives.rank(); }
  bool join() {
    if (!collectives.connect(60)) return false;
    copies->join(collectives);
    upload->join(collectives);
    return true;
  }
  void begin() {
    EXPECT_TRUE(copies->begin_attempt());
    copies->begin_work();
  }
  /// The gradient of parameter i is its value and what the rank adds to it, once for each micro-batch.
  void micro_batch(bool first, const std::vector<std::size_t>& used, bool recorded = false) {
    if (recorded) fakes.cuda.begin_graph(compute.get());
    for (const auto i : used) {
      fakes.cuda.launch(compute.get(), [this, i, first] {
        const auto value = elements(parameters[i].get(), i).numbers();
        elements(gradients[i].get(), i).change([&](double before, std::uint64_t e) {
          return (first ? 0 : before) + value[e] + rank();
        });
      });
      if (recorded) {
        device.record_in_graph(complete[i], compute.get());
      } else {
        copies->written(i, gradients[i].get());
      }
    }
    if (!recorded) return;
    fakes.cuda.launch(compute.get(), *fakes.cuda.end_graph(compute.get()));
    for (const auto i : used) copies->written(i, gradients[i].get(), &complete[i]);
  }

  /// The elements of a parameter or of its gradient.
  Elements elements(std::byte* memory, std::size_t i) const {
    const auto& entry = manifest.tensors[i];
    return {memory, entry.types.gradient, entry.has_room() ? entry.elements() : 0};
  }

  /// As the host does it, who leaves out what is fresh. The gaps stay zero.
  void write(std::size_t attempt) {
    for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
      if (!sink.fresh.contains(i))
        elements(places[i].data, i).change([&](double, std::uint64_t e) {
          return parameter_value(attempt, i, e);
        });
  }

  Team& fakes;
  const session::Manifest& manifest;
  Pages master{memory_bytes};  ///< Each process has a mapping of its own, and registers that.
  ShardSink sink;
  device::Device device;
  device::Stream compute = device.make_stream();
  std::vector<replica::Place> places;
  std::vector<device::Memory> parameters, gradients;
  std::vector<device::Event> complete;  ///< Of each gradient in a graph.
  device::DeviceCollectives collectives;
  std::optional<device::ParameterUpload> upload;
  std::optional<device::GradientCopies> copies;
};

/// What each rank does in each attempt: a random order, random unused parameters, one or two micro-batches of
/// which it may not know the last one.
struct RandomAttempt {
  RandomAttempt(std::uint64_t seed, std::size_t attempt, int rank, const session::Manifest& manifest) {
    std::mt19937_64 random(seed * 1000 + attempt * 10 + std::uint64_t(rank));
    for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
      if (is_trained(manifest.tensors[i], attempt) && random() % 4 != 0) used.push_back(i);
    std::ranges::shuffle(used, random);
    micro_batches = 1 + int(random() % 2);
    knows_last = random() % 3 != 0;
    records = random() % 2 != 0;
  }
  /// What can be trained and is frozen at the start is unfrozen before attempt 2.
  static bool is_trained(const session::TensorEntry& entry, std::size_t attempt) {
    return entry.group != session::Group::frozen || (attempt >= 2 && entry.has_room());
  }
  bool uses(std::size_t parameter) const { return std::ranges::find(used, parameter) != used.end(); }
  std::vector<std::size_t> used;
  int micro_batches;
  bool knows_last;
  bool records;  ///< Its last micro-batch is a graph.
};

class Shards : public testing::TestWithParam<FakeCuda::Execution> {};

/// Float32, all dtypes, or all dtypes in a session whose slabs have others.
session::Manifest manifest_for(std::uint64_t seed) {
  if (seed % 3 == 0) return usual_manifest();
  return mixed_manifest(
      {3000, 5000, 17, 700},
      {.bf16_runners = seed % 2 == 0, .bf16_slabs = seed % 4 == 1, .float32_gradients = seed % 3 == 2});
}

std::size_t holder_of(const session::ShardPlan& plan, std::uint64_t byte, int size) {
  for (const auto& bucket : plan.buckets())
    for (int position = 0; position < size; ++position)
      if (const auto shard = plan.shard(bucket, position, size); byte >= shard.first && byte < shard.end)
        return std::size_t(position);
  return std::size_t(size);  // Nobody.
}

TEST_P(Shards, HoldTheSumOverTheTeamWhateverOrderEachRankHas) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    const int size = 1 + int(seed % 4);
    const bool has_slab = seed % 2 == 1;
    const bool keeps_frozen = seed % 4 != 0;  // The host writes what is frozen once.
    Team team({.size = size, .execution = GetParam(), .seed = seed});
    const auto manifest = manifest_for(seed);
    constexpr std::size_t attempts = 4;
    std::vector<std::vector<std::vector<std::byte>>> shards(attempts);
    for (auto& one : shards) one.resize(std::size_t(size));
    std::vector<std::thread> threads;
    for (int number = 0; number < size; ++number)
      threads.emplace_back([&, number] {
        TeamRank rank(team, number, manifest, has_slab);
        EXPECT_TRUE(rank.join());
        for (std::size_t a = 0; a < attempts; ++a) {
          const RandomAttempt plan(seed, a, number, manifest);
          for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
            const auto& entry = manifest.tensors[i];
            if (entry.group != session::Group::frozen) continue;
            if (RandomAttempt::is_trained(entry, a)) rank.sink.unfrozen.insert(i);
            if (keeps_frozen && a > 0) rank.sink.fresh.insert(i);
          }
          std::ranges::fill(rank.sink.shards, nothing);
          rank.write(a);
          rank.begin();
          rank.upload->load();
          for (int i = 0; i < plan.micro_batches; ++i) {
            rank.sink.last = plan.knows_last && i + 1 == plan.micro_batches;
            rank.micro_batch(i == 0, plan.used, plan.records && i + 1 == plan.micro_batches);
          }
          EXPECT_TRUE(rank.copies->finish());
          shards[a][std::size_t(number)] = rank.sink.shards;
          EXPECT_GT(rank.sink.given, 0u);
        }
      });
    for (auto& thread : threads) thread.join();
    const session::ShardPlan plan(manifest);
    for (std::size_t a = 0; a < attempts; ++a) {
      std::vector<RandomAttempt> did;
      for (int r = 0; r < size; ++r) did.emplace_back(seed, a, r, manifest);
      for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
        const auto& entry = manifest.tensors[i];
        if (!entry.has_room()) continue;
        const auto each = session::bytes_of(entry.types.gradient);
        const auto version = keeps_frozen && entry.group == session::Group::frozen ? 0 : a;
        for (std::uint64_t e = 0; e < entry.elements(); e += 1 + e % 5) {
          double sum = 0;
          for (std::size_t r = 0; r < did.size(); ++r)
            if (did[r].uses(i)) sum += did[r].micro_batches * (parameter_value(version, i, e) + double(r));
          auto holder = holder_of(plan, plan.place(i) + e * each, size);
          if (!RandomAttempt::is_trained(entry, a)) holder = did.size();  // Nobody.
          for (std::size_t r = 0; r < did.size(); ++r) {
            const auto found =
                Elements(&shards[a][r][plan.place(i)], entry.types.gradient, entry.elements())[e];
            ASSERT_EQ(!std::isnan(found), r == holder) << "rank " << r << ", element " << e << " of " << i;
            if (r == holder) {
              ASSERT_EQ(found, sum) << "attempt " << a << ", element " << e << " of " << i;
            }
          }
        }
      }
    }
    expect_clean(team, 0);
    EXPECT_EQ(team.cuda.unregistered_copies(), 0);
    EXPECT_EQ(team.cuda.held(), FakeCuda::Held{});
  }
}

INSTANTIATE_TEST_SUITE_P(Executions, Shards,
                         testing::Values(FakeCuda::Execution::stepped, FakeCuda::Execution::threads));

TEST(GradientShards, CopyOnlyTheirPartUpAndDown) {
  constexpr int size = 4;
  Team team({.size = size});
  const auto manifest = float_manifest({256'000});
  std::vector<std::thread> threads;
  for (int number = 0; number < size; ++number)
    threads.emplace_back([&, number] {
      TeamRank rank(team, number, manifest);
      EXPECT_TRUE(rank.join());
      rank.write(0);
      rank.begin();
      rank.upload->load();
      rank.sink.last = true;
      rank.micro_batch(true, {0});
      EXPECT_TRUE(rank.copies->finish());
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(team.cuda.copied(device::Direction::to_device), 256'000 * sizeof(float)) << "all ranks together";
  EXPECT_EQ(team.cuda.copied(device::Direction::to_host), 256'000 * sizeof(float));
}

TEST(GradientShards, ABucketIsQueuedBehindTheOneBeforeIt) {
  Team team({.size = 1});
  const auto manifest = usual_manifest();
  TeamRank rank(team, 0, manifest);
  ASSERT_TRUE(rank.join());
  EXPECT_EQ(rank.copies->buckets(), (std::vector<std::vector<std::size_t>>{{4}, {0, 2}, {1, 5}, {3}}));
  const auto queued = [&] { return team.nccl.calls("ncclReduceScatter"); };
  rank.begin();
  rank.sink.last = true;
  rank.micro_batch(true, {1, 5, 2, 0});
  EXPECT_EQ(queued(), 0) << "the first bucket is not complete";
  rank.micro_batch(true, {4});
  EXPECT_EQ(queued(), 3);
  EXPECT_THROW(rank.copies->written(4, rank.gradients[4].get()), ModelError);
  EXPECT_EQ(message_of<ModelError>([&] { rank.copies->written(3, rank.gradients[3].get()); }),
            "a gradient of 'p3' was passed, but the parameter is frozen");
  EXPECT_THROW(rank.copies->written(6, rank.gradients[0].get()), ModelError);
  EXPECT_TRUE(rank.copies->finish());
}

// A rank dies while the other waits for its part. The session tells the other, which is then not wanted, and
// gives the gradients of the next attempt alone.
TEST(GradientShards, AreLeftWhenAPeerDiesAndTheNextAttemptGoesOnWithoutIt) {
  Team team({.size = 2});
  const auto manifest = usual_manifest();
  std::optional<TeamRank> first(std::in_place, team, 0, manifest);
  std::optional<TeamRank> second(std::in_place, team, 1, manifest);
  ASSERT_TRUE(first->join() && second->join());
  for (auto* rank : {&*first, &*second}) {
    rank->write(0);
    rank->begin();
    rank->upload->load();
    rank->sink.last = true;
  }
  first->micro_batch(true, {4, 2, 0, 1, 5});
  second->micro_batch(true, {4});
  second.reset();  // Aborts, as the end of a process does.
  first->sink.wants = false;
  EXPECT_FALSE(first->copies->finish());
  EXPECT_TRUE(first->collectives.aborted());
  // The second rank never began the sums after the first one.
  EXPECT_LE(first->sink.given, 1u) << "a part of a sum that may be incomplete";
  EXPECT_FALSE(first->device.given_up());

  first->sink.wants = true;
  first->begin();
  EXPECT_THROW(first->micro_batch(true, {4}), device::DeviceError) << "the team needs another communicator";
  first->copies->leave();
  first->upload->leave();
  first.reset();
  EXPECT_EQ(team.nccl.live(), 0);
  EXPECT_EQ(team.nccl.misuses(), std::vector<std::string>{});
  EXPECT_EQ(team.cuda.held(), FakeCuda::Held{});
}

// A rank leaves an attempt before its end, for instance by an exception of the model.
TEST(GradientShards, ThatAreLeftInTheMiddleAbortTheCommunicator) {
  for (const bool begins_again : {true, false}) {
    Team team({.size = 2});
    const auto manifest = usual_manifest();
    {
      TeamRank first(team, 0, manifest);
      TeamRank second(team, 1, manifest);
      ASSERT_TRUE(first.join() && second.join());
      first.begin();
      first.sink.last = true;
      first.micro_batch(true, {4});
      if (begins_again) {
        first.begin();
        EXPECT_TRUE(first.collectives.aborted());
      }
    }
    EXPECT_EQ(team.nccl.live(), 0);
    EXPECT_EQ(team.cuda.held(), FakeCuda::Held{});
    EXPECT_EQ(team.cuda.endless_waits(), 0);
    EXPECT_EQ(team.cuda.early_unregistrations(), 0);
  }
}

TEST(GradientShards, OfARankWhosePeerHangsEndAtTheDeadline) {
  Team team({.size = 2});
  const auto manifest = usual_manifest();
  TeamRank first(team, 0, manifest, true, 0.1);
  TeamRank second(team, 1, manifest, true, 0.1);
  ASSERT_TRUE(first.join() && second.join());
  first.begin();
  first.micro_batch(true, {4});
  EXPECT_THROW(first.copies->finish(), device::DeviceError);
  EXPECT_TRUE(first.collectives.aborted());
  EXPECT_FALSE(first.device.given_up());
}

}  // namespace
}  // namespace accelmgr::test
