// Tests of the reduction where devices have summed up the gradients of teams: random tensors, random teams
// beside ranks that are alone, random takeovers. Values are small whole numbers, so that sums are exact.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "session/reduction.hpp"
#include "session_support.hpp"

namespace accelmgr::session {
namespace {

constexpr std::uint64_t chunk = chunk_bytes / sizeof(float);

class TeamStep {
 public:
  explicit TeamStep(std::uint64_t seed)
      : random_(seed),
        ranks_(1 + int(random_() % 7)),
        manifest_(make_manifest()),
        session_(session_of(manifest_, ranks_)),
        plan_(manifest_, Element::f32) {
    // Each rank takes no part, is alone, or is in one of two teams.
    teams_.resize(4);
    for (int rank = 0; rank < ranks_; ++rank) teams_[random_() % 4] |= RankMask{1} << rank;
    participants_ = all_ranks(ranks_) & ~teams_[0];
    if (participants_ == 0) participants_ = std::exchange(teams_[0], 0), teams_[1] = participants_;
    accumulate_ = random_() % 2 == 0;
    open();
    for (int rank = 0; rank < ranks_; ++rank) {
      std::ranges::fill(slab_of(session_, rank), std::numeric_limits<float>::quiet_NaN());
      for (auto& tag : session_.tags(rank)) tag.store(attempt_ - 1);
    }
    for (int rank = 0; rank < ranks_; ++rank)
      if ((teams_[1] >> rank & 1) != 0) publish_alone(rank);
    publish_team(teams_[2]);
    publish_team(teams_[3]);
    for (int rank = 0; rank < ranks_; ++rank)
      if ((participants_ >> rank & 1) != 0) vote(rank);
  }

  /// Another process finishes all slices; some were left in the middle by their dead runners.
  void finish() {
    const Reduction reduction(session_, manifest_);
    for (int rank = 0; rank < ranks_; ++rank) {
      if ((participants_ >> rank & 1) == 0) continue;
      if (accumulate_ && random_() % 2 == 0) die_in_the_middle(rank);
      reduction.finish_slice(rank, attempt_);
    }
    EXPECT_TRUE(close_if_over(session_, attempt_));
  }

  void check() {
    const auto master = gradients_of(session_);
    for (std::uint64_t i = 0; i < master.size(); ++i) ASSERT_EQ(master[i], expected(i)) << "element " << i;
  }

 private:
  Manifest make_manifest() {
    Manifest manifest;
    for (std::uint64_t tensors = 1 + random_() % 8; tensors > 0; --tensors) {
      const auto count = random_() % 10 == 0 ? 270'000 + random_() % 9000 : 1 + random_() % 3000;
      manifest.tensors.push_back({.name = "w" + std::to_string(tensors),
                                  .aliases = {},
                                  .shape = {static_cast<std::int64_t>(count)},
                                  .count = count,
                                  .group = static_cast<Group>(random_() % 3)});
    }
    return manifest;
  }

  // Each rank makes one of two micro-batches, so the mean is twice the sum.
  void open() {
    std::ranges::fill(gradients_of(session_), before_);
    sum_.assign(session_.header().elements, 0);
    attempt_ = open_attempt(session_, {.participants = participants_,
                                       .accumulate = accumulate_,
                                       .shares = even_shares(2),
                                       .batch_size = 4});
  }

  void vote(int rank) {
    Reduction(session_, manifest_).reset_cursor(rank, attempt_);
    auto& ballot = session_.record(rank).ballot;
    ballot.micro_batches = 1;
    ballot.team = 0;
    for (const auto team : {teams_[2], teams_[3]})
      if ((team >> rank & 1) != 0) ballot.team = team;
    cast_vote({session_, rank}, attempt_);
  }

  /// The rank's gradient of a tensor; not every rank uses every tensor.
  bool used(int rank, std::size_t tensor) const {
    return (std::size_t(rank) * 5 + tensor * 3 + attempt_) % 4 != 0;
  }
  static float value(int rank, std::size_t tensor, std::uint64_t i) {
    return float((i * 3 + tensor * 5 + std::uint64_t(rank) * 7) % 11);
  }

  void publish_alone(int rank) {
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
      const auto& tensor = manifest_.tensors[t];
      if (!used(rank, t)) continue;
      session_.tags(rank)[t].store(attempt_);
      // The gaps of a slab are zero.
      std::fill_n(&slab_of(session_, rank)[tensor.first], align_up(tensor.count, 16), 0.0F);
      for (std::uint64_t i = 0; i < tensor.count; ++i) {
        slab_of(session_, rank)[tensor.first + i] = value(rank, t, i);
        sum_[tensor.first + i] += value(rank, t, i);
      }
    }
  }

  /// Each rank of the team has its shards, and nothing else.
  void publish_team(RankMask team) {
    std::vector<float> sum(sum_.size());
    std::vector<int> members;
    for (int rank = 0; rank < ranks_; ++rank) {
      if ((team >> rank & 1) == 0) continue;
      members.push_back(rank);
      for (std::size_t t = 0; t < manifest_.tensors.size(); ++t)
        for (std::uint64_t i = 0; i < manifest_.tensors[t].count && used(rank, t); ++i)
          if (manifest_.tensors[t].group != Group::frozen)
            sum[manifest_.tensors[t].first + i] += value(rank, t, i);
    }
    for (const auto& bucket : plan_.buckets())
      for (std::size_t position = 0; position < members.size(); ++position) {
        const auto shard = plan_.shard(bucket, int(position), int(members.size()));
        std::copy_n(&sum[shard.first], shard.count(), &slab_of(session_, members[position])[shard.first]);
      }
    for (std::size_t i = 0; i < sum.size(); ++i) sum_[i] += sum[i];
  }

  float expected(std::uint64_t i) const { return (accumulate_ ? before_ : 0) + 2 * sum_[i]; }

  /// What a runner leaves that was killed while it reduced a random chunk of its slice.
  void die_in_the_middle(int rank) {
    const auto chunks = (sum_.size() + chunk - 1) / chunk;
    const auto part = slice(chunks, __builtin_popcount(participants_ & ((RankMask{1} << rank) - 1)),
                            __builtin_popcount(participants_));
    if (part.begin == part.end) return;
    const auto master = gradients_of(session_);
    const auto dies_in = part.begin + random_() % (part.end - part.begin);
    for (auto i = part.begin * chunk; i < dies_in * chunk; ++i) master[i] = expected(i);
    const auto first = dies_in * chunk, end = std::min<std::uint64_t>(first + chunk, sum_.size());
    std::memcpy(session_.undo(rank), &master[first], (end - first) * sizeof(float));
    for (auto i = first; i < first + (end - first) / 2; ++i) master[i] = expected(i);
    session_.record(rank).cursor.store(encode(Cursor{attempt_, dies_in - part.begin, true}));
  }

  std::mt19937_64 random_;
  int ranks_;
  Manifest manifest_;
  Session session_;
  ShardPlan plan_;
  std::vector<RankMask> teams_;  ///< No participants, alone, two teams.
  RankMask participants_ = 0;
  bool accumulate_ = false;
  std::uint64_t attempt_ = 0;
  std::vector<float> sum_;
  static constexpr float before_ = 3;
};

TEST(TeamReduction, TakesEachShardFromItsHolderAndAddsWhatOthersHave) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    TeamStep step(seed);
    step.finish();
    step.check();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace accelmgr::session
