// Tests of the reduction where devices have summed up the gradients of teams: random tensors, random teams
// beside ranks that are alone, random takeovers. Values are small whole numbers, so that sums are exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "engine/session/reduction.hpp"
#include "reduction_reference.hpp"

namespace accelmgr::session {
namespace {

class TeamStep {
 public:
  explicit TeamStep(std::uint64_t seed)
      : random_(seed),
        ranks_(1 + int(random_() % 7)),
        manifest_(make_manifest()),
        session_(session_of(manifest_, ranks_)),
        plan_(manifest_) {
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t)
      if (const auto& tensor = manifest_.tensors[t];
          tensor.group == Group::frozen && tensor.has_room() && random_() % 2 == 0)
        unfreeze(session_, manifest_, t);
    // Each rank takes no part, is alone, or is in one of two teams.
    teams_.resize(4);
    for (int rank = 0; rank < ranks_; ++rank) teams_[random_() % 4] |= RankMask{1} << rank;
    participants_ = all_ranks(ranks_) & ~teams_[0];
    if (participants_ == 0) participants_ = std::exchange(teams_[0], 0), teams_[1] = participants_;
    accumulate_ = random_() % 2 == 0;
    open();
    for (int rank = 0; rank < ranks_; ++rank) {
      clear_slab(rank);
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
    const auto master = numbers_in(session_.gradients(), manifest_);
    for (std::size_t t = 0; t < master.size(); ++t)
      for (std::uint64_t i = 0; i < master[t].size(); ++i)
        ASSERT_EQ(master[t][i], expected(t, i))
            << "element " << i << " of tensor " << t << ", " << name_of(manifest_.tensors[t].dtype);
  }

 private:
  /// Half of the models are all float32.
  Manifest make_manifest() {
    constexpr DType dtypes[]{DType::float32,   DType::bfloat16,   DType::float16, DType::float64,
                             DType::complex64, DType::complex128, DType::int8};
    Manifest manifest;
    const bool is_mixed = random_() % 2 == 0;
    for (std::uint64_t tensors = 1 + random_() % 8; tensors > 0; --tensors) {
      const auto count = random_() % 10 == 0 ? 270'000 + random_() % 9000 : 1 + random_() % 3000;
      const auto dtype = is_mixed ? dtypes[random_() % std::size(dtypes)] : DType::float32;
      const auto group = dtype == DType::int8 ? Group::frozen : static_cast<Group>(random_() % 3);
      manifest.tensors.push_back(tensor_of(count, dtype, group));
    }
    manifest.set_precision({.bf16_runners = is_mixed && random_() % 2 == 0,
                            .bf16_slabs = random_() % 4 == 0,
                            .float32_gradients = random_() % 2 == 0});
    return manifest;
  }

  /// NaN, but for the gaps, which are zero.
  void clear_slab(int rank) {
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
      if (!trained(t)) continue;
      const auto& tensor = manifest_.tensors[t];
      std::fill_n(session_.slab(rank) + tensor.slab, tensor.slab_bytes(), std::byte{0xff});
    }
  }

  // Each rank makes one of two micro-batches, so the mean is twice the sum.
  void open() {
    for (const auto& tensor : manifest_.tensors) in_master(session_.gradients(), tensor).fill(before_);
    sum_ = numbers_in(session_.gradients(), manifest_);
    for (auto& sums : sum_) std::ranges::fill(sums, 0);
    attempt_ = open_attempt(session_, {.participants = participants_,
                                       .accumulate = accumulate_,
                                       .shares = even_shares(2),
                                       .batch_size = 4});
  }

  void vote(int rank) {
    Reduction(session_, manifest_).reset_cursor(rank, attempt_);
    auto& ballot = session_.record(rank).ballot;
    ballot.micro_batches = 1;
    cast_vote({session_, rank}, attempt_);
  }

  bool trained(std::size_t tensor) const { return has_gradient(session_, manifest_, tensor); }
  /// The rank's gradient of a tensor; not every rank uses every tensor.
  bool used(int rank, std::size_t tensor) const {
    return trained(tensor) && (std::size_t(rank) * 5 + tensor * 3 + attempt_) % 4 != 0;
  }
  static double value(int rank, std::size_t tensor, std::uint64_t i) {
    return double((i * 3 + tensor * 5 + std::uint64_t(rank) * 7) % 11);
  }

  void publish_alone(int rank) {
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
      if (!used(rank, t)) continue;
      session_.tags(rank)[t].store(attempt_);
      for (std::uint64_t i = 0; i < manifest_.tensors[t].elements(); ++i) {
        in_slab(session_, rank, manifest_.tensors[t]).set(i, value(rank, t, i));
        sum_[t][i] += value(rank, t, i);
      }
    }
  }

  /// Each rank of the team has its shards, and nothing else.
  void publish_team(RankMask team) {
    std::vector<int> members;
    for (int rank = 0; rank < ranks_; ++rank)
      if ((team >> rank & 1) != 0) members.push_back(rank);
    for (std::size_t b = 0; b < plan_.buckets().size(); ++b)
      for (std::size_t position = 0; position < members.size(); ++position)
        for (const auto t : plan_.tensors(b))
          if (trained(t))
            publish_shard(t, plan_.shard(plan_.buckets()[b], int(position), int(members.size())), members,
                          members[position]);
  }
  void publish_shard(std::size_t t, const Bytes& shard, const std::vector<int>& members, int holder) {
    const auto& tensor = manifest_.tensors[t];
    const auto each = bytes_of(tensor.types.gradient);
    const auto place = plan_.place(t);
    const auto tensor_end = place + tensor.elements() * each;
    const auto begin = std::max(shard.first, place), end = std::min(shard.end, tensor_end);
    if (begin >= end) return;
    session_.tags(holder)[t].store(attempt_, (begin - place) / each,
                                   end == tensor_end ? Tag::to_the_end : (end - place) / each);
    for (auto byte = begin; byte < end; byte += each) {
      const auto i = (byte - place) / each;
      double sum = 0;
      for (const int rank : members)
        if (used(rank, t)) sum += value(rank, t, i);
      in_slab(session_, holder, tensor).set(i, sum);
      sum_[t][i] += sum;
    }
  }

  double expected(std::size_t tensor, std::uint64_t i) const {
    if (!trained(tensor)) return before_;
    return (accumulate_ ? before_ : 0) + 2 * sum_[tensor][i];
  }

  /// What a runner leaves that was killed while it reduced a random chunk of its slice.
  void die_in_the_middle(int rank) {
    const auto chunks = chunks_of(session_, manifest_);
    const auto part = slice_of_rank(rank, participants_, chunks.size());
    if (part.begin == part.end) return;
    auto after = sum_;
    for (std::size_t t = 0; t < after.size(); ++t)
      for (std::uint64_t i = 0; i < after[t].size(); ++i) after[t][i] = expected(t, i);
    std::vector<std::byte> reduced(session_.header().bytes.gradient_room);
    put_numbers(reduced.data(), manifest_, after);
    auto* master = session_.gradients();
    const auto dies_in = part.begin + random_() % (part.end - part.begin);
    for (auto i = part.begin; i < dies_in; ++i)
      std::copy_n(&reduced[chunks[i].first], chunks[i].count(), master + chunks[i].first);
    const auto& chunk = chunks[dies_in];
    std::copy_n(master + chunk.first, chunk.count(), session_.undo(rank));
    std::copy_n(&reduced[chunk.first], chunk.count() / 2, master + chunk.first);
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
  Numbers sum_;
  static constexpr double before_ = 3;
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
