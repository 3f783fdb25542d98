// Tests of Reduction::finish_slice(), also where devices have summed up the gradients of teams: random
// tensors, random teams beside ranks that are alone, random takeovers. They also check that it allocates no
// memory. Gradients are small whole numbers, so that sums are exact.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <random>
#include <thread>
#include <utility>

#include "base/fault_point.hpp"
#include "engine/session/reduction.hpp"
#include "reduction_reference.hpp"

namespace {

thread_local bool counts = false;
thread_local int allocations = 0;

}  // namespace

// Not inlined, because g++ would warn of malloc() and delete as a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (counts) ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (counts) ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace accelmgr::session {
namespace {

/// Ends this process at the fault point that is reached as the one with this number, on any thread.
std::atomic<int> points_left{0};
base::FaultEffect count_down(base::FaultPhase) {
  if (points_left.fetch_sub(1) == 1) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  std::this_thread::yield();  // To another one that is at a fault point, most times.
  return base::FaultEffect::none;
}

/// A committed attempt, whose master has no two chunks with the same values.
class Step {
 public:
  /// Of random models, ranks and teams.
  explicit Step(std::uint64_t seed)
      : random_(seed),
        ranks_(1 + int(random_() % 7)),
        manifest_(make_manifest()),
        session_(session_of(manifest_, ranks_)) {
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t)
      if (const auto& tensor = manifest_.tensors[t];
          tensor.group == Group::frozen && tensor.has_room() && random_() % 2 == 0)
        unfreeze(session_, manifest_, t);
    for (int rank = 0; rank < ranks_; ++rank) teams_[random_() % 4] |= RankMask{1} << rank;
    participants_ = all_ranks(ranks_) & ~teams_[0];
    if (participants_ == 0) participants_ = std::exchange(teams_[0], 0), teams_[1] = participants_;
    accumulate_ = random_() % 2 == 0;
    commit();
  }
  /// Of ranks that are alone.
  Step(SmallSession small, bool accumulate)
      : ranks_(small.session.ranks()),
        manifest_(std::move(small.manifest)),
        session_(std::move(small.session)),
        participants_(all_ranks(ranks_)),
        accumulate_(accumulate) {
    teams_[1] = participants_;
    commit();
  }

  /// This process finishes all slices; some were left in the middle by their dead runners.
  void finish() {
    for (int rank = 0; rank < ranks_; ++rank) {
      if ((participants_ >> rank & 1) == 0) continue;
      if (random_() % 2 == 0) die(rank, 1 + int(random_() % 3), 1 + int(random_() % 40));
      counts = true;
      finish(rank);
      counts = false;
    }
    EXPECT_TRUE(close_if_over(session_, attempt_));
  }

  void finish(int rank, base::Helpers* helpers = nullptr) {
    reduction_.finish_slice(rank, attempt_, helpers);
  }

  /// A process that finishes a slice is killed at the fault point that is reached as the one with this
  /// number, on any of its threads, or at its end.
  void die(int rank, int threads, int point) {
    const auto runner = fork();
    if (runner == 0) {
      base::Helpers helpers(threads);
      static constexpr base::FaultHandler handler{.arm = nullptr, .reach = count_down};
      points_left = point;
      base::fault_handler = &handler;
      finish(rank, &helpers);
      kill(getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(waitpid(runner, &status, 0), runner);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  }

  void check() {
    const auto master = numbers_in(session_.gradients(), manifest_), right = expected();
    for (std::size_t t = 0; t < master.size(); ++t)
      ASSERT_TRUE(master[t] == right[t]) << "tensor " << t << ", " << name_of(manifest_.tensors[t].dtype);
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

  static double before(std::uint64_t i) { return double(i / 512 % 50); }

  // Each rank makes one of two micro-batches, so the mean is twice the sum.
  void commit() {
    for (const auto& tensor : manifest_.tensors)
      in_master(session_.gradients(), tensor).change([](double, std::uint64_t i) { return before(i); });
    sum_ = numbers_in(session_.gradients(), manifest_);
    for (auto& sums : sum_) std::ranges::fill(sums, 0);
    attempt_ = open_attempt(session_, {.participants = participants_,
                                       .accumulate = accumulate_,
                                       .shares = even_shares(2),
                                       .batch_size = 4});
    for (int rank = 0; rank < ranks_; ++rank) {
      clear_slab(rank);
      for (auto& tag : session_.tags(rank)) tag.store(attempt_ - 1);
      if ((teams_[1] >> rank & 1) != 0) publish_alone(rank);
    }
    publish_team(teams_[2]);
    publish_team(teams_[3]);
    for (int rank = 0; rank < ranks_; ++rank)
      if ((participants_ >> rank & 1) != 0) vote(rank);
  }

  void vote(int rank) {
    reduction_.reset_cursor(rank, attempt_);
    session_.record(rank).ballot.micro_batches = 1;
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

  Numbers expected() const {
    auto master = sum_;
    for (std::size_t t = 0; t < master.size(); ++t)
      for (std::uint64_t i = 0; i < master[t].size(); ++i)
        master[t][i] = 2 * sum_[t][i] + (accumulate_ || !trained(t) ? before(i) : 0);
    return master;
  }

  std::mt19937_64 random_;
  int ranks_;
  Manifest manifest_;
  Session session_;
  ShardPlan plan_{manifest_};
  Reduction reduction_{session_, manifest_};
  std::array<RankMask, 4> teams_{};  ///< No participants, ranks that are alone, two teams.
  RankMask participants_ = 0;
  bool accumulate_ = false;
  std::uint64_t attempt_ = 0;
  Numbers sum_;
};

TEST(FinishSlice, AddsWhatRanksHaveAndEachShardOfItsHolderAndAllocatesNoMemory) {
  for (std::uint64_t seed = 0; seed < 100 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Step step(seed);
    step.finish();
    step.check();
    EXPECT_EQ(allocations, 0);
  }
}

// The slices of both ranks have several parts. The runner of one is killed on any of its threads, and another
// process finishes its slice.
TEST(FinishSlice, OfSeveralPartsGoesOnWhereverItsThreadsWereKilled) {
  std::minstd_rand random(7);
  for (int round = 0; round < 12; ++round) {
    const bool accumulate = round % 2 == 0;
    const int dies_at = 1 + int(random() % (accumulate ? 12000 : 30));
    SCOPED_TRACE(fmt::format("accumulate {}, dies at fault point {}", accumulate, dies_at));
    Step step(mixed_session(2, {900'000, 3, 1'300'000, 1024}), accumulate);
    step.die(1, 4, dies_at);
    base::Helpers helpers(1 + round % 3);
    for (const int rank : {1, 0}) step.finish(rank, &helpers);
    step.check();
  }
}

}  // namespace
}  // namespace accelmgr::session
