#include "session/reduction.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "session_support.hpp"

namespace accelmgr::session {
namespace {

// A committed attempt of `ranks` ranks over tensors of 3000, 17 and 5000 elements. The slices cut through
// tensors and chunks.
class ReductionTest : public testing::TestWithParam<int> {
 protected:
  ReductionTest()
      : small_(small_session(GetParam(), {3000, 17, 5000})), reduction_(small_.session, small_.manifest) {
    for (int rank = 0; rank < ranks(); ++rank)
      for (std::size_t t = 0; t < 3; ++t) fill(rank, t, value(rank, t));
  }

  int ranks() const { return GetParam(); }
  Session& session() { return small_.session; }
  static float value(int rank, std::size_t tensor) { return float(rank + 1) * 10 + float(tensor); }

  void fill(int rank, std::size_t tensor, float v) {
    const auto& entry = small_.manifest.tensors[tensor];
    for (std::uint64_t i = 0; i < entry.count; ++i) slab_of(session(), rank)[entry.first + i] = v + float(i);
  }

  std::uint64_t commit(bool accumulate, bool mean_buffers = false) {
    return commit(Request{.participants = all_ranks(ranks()),
                          .accumulate = accumulate,
                          .shares = even_shares(1),
                          .batch_size = 4,
                          .by_samples = 0,
                          .mean_buffers = mean_buffers,
                          .parameter_version = 0});
  }

  std::uint64_t commit(const Request& request, bool nonfinite = false) {
    const auto attempt = open_attempt(session(), request);
    for (int rank = 0; rank < ranks(); ++rank) {
      for (auto& tag : session().tags(rank)) tag.store(attempt);
      reduction_.reset_cursor(rank, attempt);
      auto& ballot = session().record(rank).ballot;
      ballot.loss = 1.0;
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

  std::vector<float> expected(RankMask present_in_first = ~RankMask{0}) const {
    std::vector<float> out(small_.session.header().elements);
    for (std::size_t t = 0; t < 3; ++t)
      for (int rank = 0; rank < ranks(); ++rank) {
        if (t == 0 && (present_in_first >> rank & 1) == 0) continue;
        for (std::uint64_t i = 0; i < small_.manifest.tensors[t].count; ++i)
          out[small_.manifest.tensors[t].first + i] += value(rank, t) + float(i);
      }
    return out;
  }

  std::vector<float> master() { return {gradients_of(session()).begin(), gradients_of(session()).end()}; }

  SmallSession small_;
  Reduction reduction_;
};

TEST_P(ReductionTest, OverwritesWithTheSumAndZeroesTheGaps) {
  std::fill(gradients_of(session()).begin(), gradients_of(session()).end(), 7.0f);
  finish_all(commit(false));
  EXPECT_EQ(master(), expected());
}

TEST_P(ReductionTest, AccumulatesOntoWhatIsThere) {
  finish_all(commit(false));
  finish_all(commit(true));
  auto twice = expected();
  for (auto& x : twice) x *= 2;
  EXPECT_EQ(master(), twice);
}

TEST_P(ReductionTest, ATensorOfAnotherAttemptCountsAsZero) {
  const auto attempt = commit(false);
  session().tags(0)[0].store(attempt - 1);
  finish_all(attempt);
  EXPECT_EQ(master(), expected(~RankMask{1}));
}

TEST_P(ReductionTest, FinishingAFinishedSliceChangesNothing) {
  const auto attempt = commit(true);
  reduction_.finish_slice(0, attempt);
  const auto before = master();
  reduction_.finish_slice(0, attempt);
  EXPECT_EQ(master(), before);
}

// For every chunk k: rebuilds what a process leaves that is killed while it reduces chunk k, when a part of
// that chunk is already reduced.
TEST_P(ReductionTest, ATakenOverSliceIsReducedExactlyOnceFromEveryChunk) {
  const auto slices = slice((session().header().elements * 4 + chunk_bytes - 1) / chunk_bytes, 0, ranks());
  for (std::uint64_t k = 0; k < slices.end - slices.begin; ++k) {
    std::fill(gradients_of(session()).begin(), gradients_of(session()).end(), 1.0f);
    const auto attempt = commit(true);
    const auto first = (slices.begin + k) * (chunk_bytes / 4);
    const auto sum = expected();
    for (std::uint64_t i = slices.begin * (chunk_bytes / 4); i < first; ++i)
      gradients_of(session())[i] += sum[i];
    std::memcpy(session().undo(0), &gradients_of(session())[first], chunk_bytes);
    for (std::uint64_t i = first; i < std::min<std::uint64_t>(first + 300, session().header().elements); ++i)
      gradients_of(session())[i] += sum[i];
    session().record(0).cursor.store(encode(Cursor{attempt, k, true}));
    finish_all(attempt);
    auto once = sum;
    for (auto& x : once) x += 1;
    ASSERT_EQ(master(), once) << "chunk " << k;
  }
}

TEST_P(ReductionTest, ClosingPublishesCountersAndBuffers) {
  const auto attempt = commit(false, true);
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
  for (const bool accumulate : {false, true})
    finish_all(commit({.participants = all_ranks(ranks()),
                       .accumulate = accumulate,
                       .shares = even_shares(1),
                       .batch_size = 4,
                       .loss_scale = accumulate ? 0x1p-3 : 0x1p16}));
  auto sum = expected();
  for (auto& x : sum) x = x * 0x1p-16f + x * 0x1p3f;
  EXPECT_EQ(master(), sum);
}

TEST_P(ReductionTest, TheNextLossScaleIsThatOfTheLastStepWithFiniteValues) {
  const auto next = [&](std::uint64_t good_steps) {
    return Request{.participants = all_ranks(ranks()),
                   .shares = even_shares(1),
                   .batch_size = 4,
                   .next_loss_scale = {0x1p10, good_steps}};
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

INSTANTIATE_TEST_SUITE_P(Ranks, ReductionTest, testing::Values(1, 2, 3, 5));

TEST(Mean, AFullStepIsNotScaled) {
  const Request request{.participants = 0b11,
                        .accumulate = 0,
                        .shares = even_shares(3),
                        .batch_size = 4,
                        .by_samples = 0,
                        .mean_buffers = 0,
                        .parameter_version = 0};
  EXPECT_EQ(mean_scale(request, {.loss = 0, .samples = 24, .micro_batches = 6, .nonfinite = false}), 1.0);
}

TEST(Mean, AShortStepIsDividedByWhatTookPart) {
  Request request{.participants = 0b11,
                  .accumulate = 0,
                  .shares = even_shares(3),
                  .batch_size = 4,
                  .by_samples = 0,
                  .mean_buffers = 0,
                  .parameter_version = 0};
  EXPECT_EQ(mean_scale(request, {.loss = 0, .samples = 10, .micro_batches = 3, .nonfinite = false}), 2.0);
  request.by_samples = 1;
  EXPECT_EQ(mean_scale(request, {.loss = 0, .samples = 12, .micro_batches = 3, .nonfinite = false}), 2.0);
}

TEST(Mean, OfUnequalSharesIsOverTheMicroBatchesOfTheParticipantsAlone) {
  Request request{.participants = 0b101,
                  .accumulate = 0,
                  .shares = {{1, 9, 3}},
                  .batch_size = 4,
                  .by_samples = 0,
                  .mean_buffers = 0,
                  .parameter_version = 0};
  EXPECT_EQ(mean_scale(request, {.loss = 0, .samples = 16, .micro_batches = 4, .nonfinite = false}), 1.0);
  EXPECT_EQ(mean_scale(request, {.loss = 0, .samples = 5, .micro_batches = 2, .nonfinite = false}), 2.0);
  request.by_samples = 1;
  EXPECT_EQ(mean_scale(request, {.loss = 0, .samples = 5, .micro_batches = 2, .nonfinite = false}), 3.2);
}

TEST(Mean, SlicesCoverEveryChunkOnce) {
  for (std::uint64_t chunks : {0u, 1u, 2u, 7u, 100u})
    for (int n : {1, 2, 3, 24}) {
      std::uint64_t at = 0;
      for (int p = 0; p < n; ++p) {
        EXPECT_EQ(slice(chunks, p, n).begin, at);
        at = slice(chunks, p, n).end;
      }
      EXPECT_EQ(at, chunks);
    }
}

}  // namespace
}  // namespace accelmgr::session
