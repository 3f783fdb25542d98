// Tests of Reduction::finish_slice() with random tensors and random absent gradients. They also check that it
// allocates no memory.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>
#include <new>

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
    for (const auto& tensor : tensors) in_master(session.gradients(), tensor).fill(3);
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
  void finish(int rank) { reduction_.finish_slice(rank, attempt_); }
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

}  // namespace
}  // namespace accelmgr::session
