#include "engine/session/reduction.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "engine/session/kernels.hpp"
#include "reduction_reference.hpp"

namespace accelmgr::session {
namespace {

struct Model {
  const char* name;
  SmallSession (*make)(int ranks);
};
// The slices cut through tensors and chunks.
const Model models[]{
    {"Float32",
     [](int ranks) {
       return small_session(ranks, {3000, 17, 5000});
     }},
    {"Mixed",
     [](int ranks) {
       return mixed_session(ranks, {3000, 17, 1500});
     }},
    {"MixedOfOtherPrecision",
     [](int ranks) {
       return mixed_session(ranks, {17, 3000, 700}, {.bf16_slabs = true, .float32_gradients = true});
     }},
};

// A committed attempt of `ranks` ranks over one of the models.
class ReductionTest : public testing::TestWithParam<std::tuple<int, Model>> {
 protected:
  ReductionTest() : reduction_(small_.session, small_.manifest) {
    for (int rank = 0; rank < ranks(); ++rank)
      for (std::size_t t = 0; t < tensors().size(); ++t)
        for (std::uint64_t i = 0; i < tensors()[t].elements() && tensors()[t].has_room(); ++i)
          in_slab(session(), rank, tensors()[t]).set(i, value(rank, t, i));
    fill(3);
  }

  static int ranks() { return std::get<0>(GetParam()); }
  Session& session() { return small_.session; }
  const std::vector<TensorEntry>& tensors() const { return small_.manifest.tensors; }
  /// Slabs have these exactly, with any element type. Their sums are rounded to a master of 16 bits.
  static double value(int rank, std::size_t tensor, std::uint64_t i) {
    return (rank + 1) * 10 + double(tensor) + double(i % 64);
  }

  /// Of its losses; LossWeights::field divides by the sum.
  static double weight(int rank) { return 2.5 * rank + 1; }

  /// A step of all ranks.
  static Request request(bool accumulate = false) {
    return {.participants = all_ranks(ranks()),
            .accumulate = accumulate,
            .shares = even_shares(1),
            .batch_size = 4};
  }

  std::uint64_t commit(const Request& request, bool nonfinite = false) {
    const auto attempt = open_attempt(session(), request);
    for (int rank = 0; rank < ranks(); ++rank) {
      for (auto& tag : session().tags(rank)) tag.store(attempt);
      reduction_.reset_cursor(rank, attempt);
      auto& ballot = session().record(rank).ballot;
      ballot.loss = 1.0;
      ballot.weight = weight(rank);
      ballot.samples = 4;
      ballot.micro_batches = 1;
      ballot.nonfinite = nonfinite && rank == ranks() - 1;
      cast_vote({session(), rank}, attempt);
    }
    return attempt;
  }

  void finish_all(std::uint64_t attempt) {
    for (int rank = 0; rank < ranks(); ++rank) {
      EXPECT_FALSE(close_if_over(session(), attempt)) << "closed before slice " << rank << " was finished";
      reduction_.finish_slice(rank, attempt);
    }
    EXPECT_TRUE(close_if_over(session(), attempt));
  }

  /// What the attempt makes of the master.
  Numbers expected(Numbers master, bool accumulate, double scale) {
    for (std::size_t t = 0; t < master.size(); ++t) {
      if (!has_gradient(session(), small_.manifest, t)) continue;
      for (std::uint64_t i = 0; i < master[t].size(); ++i) {
        std::vector<double> slabs;
        for (int rank = 0; rank < ranks(); ++rank)
          slabs.push_back(i < tensors()[t].elements() ? value(rank, t, i) : 0);
        master[t][i] = reduced(tensors()[t].types, slabs, scale, accumulate, master[t][i]);
      }
    }
    return master;
  }

  Numbers master() { return numbers_in(session().gradients(), small_.manifest); }
  void fill(double number) {
    for (const auto& tensor : tensors()) in_master(session().gradients(), tensor).fill(number);
  }

  SmallSession small_ = std::get<1>(GetParam()).make(ranks());
  Reduction reduction_;
};

TEST_P(ReductionTest, ClosingPublishesCountersAndBuffers) {
  auto means = request();
  means.mean_buffers = 1;
  const auto attempt = commit(means);
  const auto other = session().word().index ^ 1;
  for (int rank = 0; rank < ranks(); ++rank) {
    const float running[2] = {float(rank), 2.0f};
    const std::int64_t batches = 5 + rank;
    std::memcpy(session().buffers(other, rank) + small_.manifest.buffers[0].offset, running, 8);
    std::memcpy(session().buffers(other, rank) + small_.manifest.buffers[1].offset, &batches, 8);
  }
  finish_all(attempt);
  const auto index = session().word().index;
  EXPECT_EQ(index, other);
  EXPECT_EQ(session().counters(index).steps, 1u);
  EXPECT_EQ(session().counters(index).samples, 4u * std::uint64_t(ranks()));
  float running[2];
  std::int64_t batches = 0;
  std::memcpy(running, session().result_buffers(index) + small_.manifest.buffers[0].offset, 8);
  std::memcpy(&batches, session().result_buffers(index) + small_.manifest.buffers[1].offset, 8);
  EXPECT_FLOAT_EQ(running[0], float(ranks() - 1) / 2) << "floating point buffers are averaged";
  EXPECT_EQ(batches, 5) << "others are those of the first rank";
}

TEST_P(ReductionTest, TakesTheLossScaleOutOfTheGradients) {
  const auto before = master();
  for (const bool accumulate : {false, true}) {
    auto scaled = request(accumulate);
    scaled.loss_scale = accumulate ? 0x1p-3 : 0x1p16;
    finish_all(commit(scaled));
  }
  EXPECT_EQ(master(), expected(expected(before, false, 0x1p-16), true, 0x1p3));
}

TEST_P(ReductionTest, LeavesTheMasterAsItIsWhereTheReplicaKeepsTheGradients) {
  const auto before = master();
  auto kept = request();
  kept.applies = Applies::one_replica;
  finish_all(commit(kept));
  EXPECT_EQ(master(), before);
  EXPECT_EQ(session().counters(session().word().index).steps, 1u);
}

TEST_P(ReductionTest, TheNextLossScaleIsThatOfTheLastStepWithFiniteValues) {
  const auto next = [&](std::uint64_t good_steps) {
    auto next = request();
    next.next_loss_scale = {0x1p10, good_steps};
    return next;
  };
  const auto good_steps = [&] { return session().counters(session().word().index).loss_scale.good_steps; };
  finish_all(commit(next(3)));
  EXPECT_EQ(session().counters(session().word().index).loss_scale.scale, 0x1p10);
  EXPECT_EQ(good_steps(), 3u);
  finish_all(commit(next(4), /*nonfinite=*/true));
  EXPECT_EQ(good_steps(), 3u);
  auto skip = next(5);
  skip.skip = 1;
  finish_all(commit(skip));
  EXPECT_EQ(good_steps(), 3u);
  finish_all(commit(next(6)));
  EXPECT_EQ(good_steps(), 6u);
}

// The weights are in the ballots, so a process that takes slices over divides by the same total.
TEST_P(ReductionTest, DividesByTheWeightsOfAllRanksWhoeverFinishes) {
  double total = 0;
  for (int rank = 0; rank < ranks(); ++rank) total += weight(rank);
  auto weighted = request(true);
  weighted.loss_weights = LossWeights::field;
  const auto attempt = commit(weighted);
  const auto before = master();
  const Reduction other(session(), small_.manifest);
  for (int rank = 0; rank < ranks(); ++rank) (rank == 0 ? reduction_ : other).finish_slice(rank, attempt);
  EXPECT_TRUE(close_if_over(session(), attempt));
  EXPECT_EQ(master(), expected(before, true, 1 / total));
}

// Large numbers meet in some elements, of either sign, in one slab or several.
TEST_P(ReductionTest, ForeseesWhichSumsAreNotFinite) {
  std::mt19937 random(5);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  std::size_t lost = 0, kept = 0;
  for (int round = 0; round < 120; ++round) {
    const auto& tensor = tensors()[below(tensors().size())];
    if (!tensor.has_room() || tensor.group == Group::frozen) continue;
    // In every other round so small that no sum over ranks leaves the range.
    const bool small = round % 2 == 0;
    const double most = largest_finite(tensor.types.slab) * (small ? 0.1 : 1.0);
    if (!small) in_master(session().gradients(), tensor).fill(largest_finite(tensor.types.master) * 0.7);
    session().counters(session().word().index).gradient_range = small ? 0.01 : 0.7;
    for (int rank = 0; rank < ranks(); ++rank) {
      auto slab = in_slab(session(), rank, tensor);
      for (std::uint64_t i = 0; i < 3; ++i)
        slab.set(i, below(2) == 0 ? 1.0 : std::uniform_real_distribution(-most, most)(random));
    }
    const auto attempt = commit(request(round % 3 != 0));
    for (int rank = 0; rank < ranks(); ++rank) {
      auto& range = session().record(rank).ballot.range;
      range = {};
      for (const auto& t : tensors()) {
        if (!t.has_room()) continue;
        const auto largest =
            best_kernels().largest(session().slab(rank) + t.slab, t.elements(), t.types.slab);
        const auto one = range_of(largest, t.types);
        range = {std::max(range.sum, one.sum), std::max(range.master, one.master)};
      }
    }
    const bool fit = sums_fit(session(), session().control().request);
    const auto foreseen = reduction_.nonfinite_sums(attempt);
    finish_all(attempt);
    std::vector<std::size_t> found;
    const auto now = master();
    for (std::size_t t = 0; t < now.size(); ++t)
      if (!std::ranges::all_of(now[t], [](double number) { return std::isfinite(number); }))
        found.push_back(t);
    EXPECT_EQ(foreseen, found);
    EXPECT_TRUE(found.empty() || !fit);
    ++(found.empty() ? kept : lost);
    fill(3);
    for (int rank = 0; rank < ranks(); ++rank)
      for (std::uint64_t i = 0; i < 3; ++i) in_slab(session(), rank, tensor).set(i, 1);
  }
  EXPECT_GT(kept, 0u);
  EXPECT_GT(lost, 0u);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReductionTest,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::ValuesIn(models)),
                         [](const auto& info) {
                           return std::get<1>(info.param).name + std::to_string(std::get<0>(info.param));
                         });

TEST(Mean, IsOverTheMicroBatchesOrSamplesOfTheParticipantsAlone) {
  struct Case {
    RankMask participants;
    Shares shares;
    LossWeights weights;
    std::uint64_t samples, micro_batches;
    double scale;
    double weight = 0;
  };
  const Shares unequal{{1, 9, 3}};
  for (const auto& c : {Case{0b11, even_shares(3), LossWeights::micro_batches, 24, 6, 1.0},  // A full step.
                        Case{0b11, even_shares(3), LossWeights::micro_batches, 10, 3, 2.0},
                        Case{0b11, even_shares(3), LossWeights::samples, 12, 3, 2.0},
                        Case{0b101, unequal, LossWeights::micro_batches, 16, 4, 1.0},
                        Case{0b101, unequal, LossWeights::micro_batches, 5, 2, 2.0},
                        Case{0b101, unequal, LossWeights::samples, 5, 2, 3.2},
                        Case{0b101, unequal, LossWeights::none, 5, 2, 1.0},
                        Case{0b11, even_shares(3), LossWeights::field, 10, 3, 0.25, 4},
                        Case{0b11, even_shares(3), LossWeights::field, 10, 3, 0, 0}}) {
    const Request request{
        .participants = c.participants, .shares = c.shares, .batch_size = 4, .loss_weights = c.weights};
    EXPECT_EQ(mean_scale(request, {.loss = 0,
                                   .weight = c.weight,
                                   .samples = c.samples,
                                   .micro_batches = c.micro_batches,
                                   .nonfinite = false}),
              c.scale)
        << c.samples << " samples";
  }
}

}  // namespace
}  // namespace accelmgr::session
