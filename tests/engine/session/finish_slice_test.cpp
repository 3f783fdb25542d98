// Tests of Reduction::finish_slice() with random tensors and random absent gradients. They also check that it
// allocates no memory.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <random>
#include <thread>

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

/// A session with a committed attempt. `present(rank, tensor)` says which rank has which gradient. Gradients
/// are small whole numbers, so that sums are exact.
class Committed {
 public:
  template <class Present>
  Committed(SmallSession small, bool accumulate, Present present)
      : small_(std::move(small)), reduction_(small_.session, small_.manifest) {
    auto& session = small_.session;
    const auto& tensors = small_.manifest.tensors;
    for (const auto& tensor : tensors)  // No two chunks have the same values.
      in_master(session.gradients(), tensor).change([](double, std::uint64_t i) {
        return double(i / 512 % 50);
      });
    expected = master();
    for (std::size_t t = 0; t < tensors.size(); ++t)
      if (!accumulate && has_gradient(session, small_.manifest, t)) std::ranges::fill(expected[t], 0);
    attempt_ = open_attempt(session, {.participants = all_ranks(session.ranks()),
                                      .accumulate = accumulate,
                                      .shares = even_shares(1),
                                      .batch_size = 4,
                                      .mean_buffers = 1});
    for (int rank = 0; rank < session.ranks(); ++rank) {
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        session.tags(rank)[t].store(present(rank, t) ? attempt_ : attempt_ - 1);
        if (!has_gradient(session, small_.manifest, t)) continue;
        for (std::uint64_t i = 0; i < tensors[t].elements(); ++i) {
          const auto value = double(i % 7 + 10 * (t % 5) + static_cast<std::size_t>(rank));
          in_slab(session, rank, tensors[t]).set(i, value);
          if (present(rank, t)) expected[t][i] += value;
        }
      }
      reduction_.reset_cursor(rank, attempt_);
      session.record(rank).ballot.micro_batches = 1;
      cast_vote({session, rank}, attempt_);
    }
  }
  void finish(int rank, base::Helpers* helpers = nullptr) {
    reduction_.finish_slice(rank, attempt_, helpers);
  }
  Numbers master() { return numbers_in(small_.session.gradients(), small_.manifest); }

  Numbers expected;

 private:
  SmallSession small_;
  Reduction reduction_;
  std::uint64_t attempt_ = 0;
};

RC_GTEST_PROP(FinishSlice, SumsTheGradientsThatAreThere, ()) {
  const int ranks = *rc::gen::inRange(1, 5);
  const auto counts = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<std::uint64_t>>(rc::gen::inRange<std::uint64_t>(1, 1500)));
  auto small = *rc::gen::arbitrary<bool>()
                   ? small_session(ranks, counts)
                   : mixed_session(ranks, counts,
                                   {.bf16_runners = *rc::gen::arbitrary<bool>(),
                                    .bf16_slabs = *rc::gen::arbitrary<bool>(),
                                    .float32_gradients = *rc::gen::arbitrary<bool>()});
  const auto present = *rc::gen::container<std::vector<std::uint32_t>>(
      small.manifest.tensors.size(), rc::gen::inRange<std::uint32_t>(0, 1u << ranks));
  Committed step(std::move(small), *rc::gen::arbitrary<bool>(),
                 [&](int rank, std::size_t tensor) { return (present[tensor] >> rank & 1) != 0; });
  for (int rank = 0; rank < ranks; ++rank) step.finish(rank);
  RC_ASSERT(step.master() == step.expected);
}

TEST(FinishSlice, AllocatesNoMemory) {
  for (const bool accumulate : {false, true}) {
    Committed step(mixed_session(3, {5000, 3, 2000, 17, 900}), accumulate, [](int rank, std::size_t tensor) {
      return (static_cast<std::size_t>(rank) + tensor) % 2 == 0;
    });
    counts = true;
    for (int rank = 0; rank < 3; ++rank) step.finish(rank);
    counts = false;
    EXPECT_EQ(allocations, 0) << (accumulate ? "accumulating" : "overwriting");
    EXPECT_EQ(step.master(), step.expected);
  }
}

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

// The slices of both ranks have several parts. The runner of one is killed on any of its threads, and another
// process finishes its slice.
TEST(FinishSlice, OfSeveralPartsGoesOnWhereverItsThreadsWereKilled) {
  std::minstd_rand random(7);
  for (int round = 0; round < 12; ++round) {
    const bool accumulate = round % 2 == 0;
    const int dies_at = 1 + int(random() % (accumulate ? 12000 : 30));
    SCOPED_TRACE(fmt::format("accumulate {}, dies at fault point {}", accumulate, dies_at));
    Committed step(
        mixed_session(2, {900'000, 3, 1'300'000, 1024}), accumulate,
        [](int rank, std::size_t tensor) { return (static_cast<std::size_t>(rank) + tensor) % 3 != 0; });
    const auto runner = fork();
    if (runner == 0) {
      base::Helpers helpers(4);
      static constexpr base::FaultHandler handler{.arm = nullptr, .reach = count_down};
      points_left = dies_at;
      base::fault_handler = &handler;
      step.finish(1, &helpers);
      kill(getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(waitpid(runner, &status, 0), runner);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    base::Helpers helpers(1 + round % 3);
    for (const int rank : {1, 0}) step.finish(rank, &helpers);
    EXPECT_TRUE(step.master() == step.expected);
  }
}

}  // namespace
}  // namespace accelmgr::session
