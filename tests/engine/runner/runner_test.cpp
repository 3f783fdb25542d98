// Tests of one runner process. The test plays its manager, its host and the other rank.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string>

#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "engine/replica/model.hpp"
#include "engine/replica/replica.hpp"
#include "engine/runner/process.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/batch_queue.hpp"

namespace accelmgr::runner {
namespace {

constexpr std::size_t width = 4;
constexpr std::uint64_t batches = 2;
constexpr session::RankMask both = 3;

base::Deadline soon() { return base::Deadline::in_seconds(60); }

/// Multiplies a weight with the batch, so its gradient is the batch.
class Product final : public replica::Replica {
 public:
  /// What a model does until its result is not wanted any more, like a device that hangs.
  enum class Waits { never, once, always };
  explicit Product(Waits waits = Waits::never) : waits_(waits) {}
  replica::Description describe() override {
    return {{{.name = "weight",
              .dtype = DType::float32,
              .shape = {width},
              .strides = {1},
              .data = reinterpret_cast<std::byte*>(initial_.data()),
              .identity = 1}},
            {}};
  }
  void bind(const replica::Binding& to) override {
    weight_ = reinterpret_cast<const float*>(to.places[0].data);
    binding_.emplace(to);
  }
  void seed(std::uint64_t) override {}
  void begin_attempt() override { loss_ = runs_ = last_ = 0; }
  void load_parameters() override { ++loads_; }
  void run(std::span<const replica::Field> batch, double divisor) override {
    const auto* input = reinterpret_cast<const float*>(batch[0].data);
    std::array<float, width> gradient{};
    ++runs_;
    if (binding_->progress.last_micro_batch()) last_ = runs_;
    for (std::size_t i = 0; i < width; ++i) {
      loss_ += double(weight_[i] * input[i]) / divisor;
      gradient[i] = static_cast<float>(input[i] / divisor);
    }
    binding_->progress.backward_begins();
    binding_->gradients.capture(0, gradient.data());
  }
  replica::Totals collect() override {
    while (waits_ != Waits::never && binding_->progress.wanted()) sched_yield();
    if (waits_ == Waits::once) {
      waits_ = Waits::never;
      return {};
    }
    return {loss_, {{loads_ > 1 ? "last, of parameters that were loaded again" : "last", last_}}};
  }
  void save(const replica::State&) override {}
  void load(const replica::ConstState&) override {}

 private:
  std::array<float, width> initial_{1, 1, 1, 1};
  const float* weight_ = nullptr;
  std::optional<replica::Binding> binding_;
  double loss_ = 0;
  double runs_ = 0, last_ = 0;  ///< Micro-batches, and which of them was said to be the last.
  int loads_ = 0;
  Waits waits_;
};

/// Rank 0 of two, which computes on batches of ones.
class RunnerTest : public testing::Test {
 protected:
  explicit RunnerTest(Product::Waits waits = Product::Waits::never, std::uint64_t published = batches,
                      const LossScaling& scaling = {})
      : published_(published) {
    replica::register_factory(
        "product", [waits](const Config&, replica::Role) { return std::make_unique<Product>(waits); });
    config_.model.kind = "product";
    config_.nprocs = 2;
    config_.loss_scaling = scaling;
    config_.runners.threads = 1;
    auto [ours, theirs] = ipc::socket_pair();
    lifeline_ = std::move(ours);
    child_ = ipc::fork_self([this, &theirs = theirs] {
      lifeline_.reset();
      ipc::SpawnRequest request{.rank = 0, .generation = 1, .fds = {}};
      for (const int fd : session_.fds()) request.fds.push_back(base::duplicate(fd));
      request.fds.push_back(std::move(theirs));
      _exit(run(config_, std::move(request)));
    });
    EXPECT_NE(ipc::wait_ready(lifeline_.get(), POLLIN, soon()), 0) << "it is not ready";
  }
  ~RunnerTest() override {
    ipc::send_signal(child_.pidfd.get(), SIGKILL);
    EXPECT_TRUE(ipc::wait_ended(child_.pidfd.get(), soon()));
    ipc::take_exit_status(child_.pidfd.get());
  }

  session::Session make_session() {
    Product model;
    const auto tensors = replica::tensors_of(model.describe());
    auto manifest = tensors.manifest;
    manifest.fields = {{.name = "input", .shape = {width}, .element_bytes = width * sizeof(float)}};
    session::Extent extent{.ranks = 2, .bytes = manifest.place_tensors()};
    extent.tensors = manifest.tensors.size();
    extent.buffer_bytes = manifest.place_buffers();
    extent.slots = batches;
    extent.slot_bytes = manifest.place_fields(1);
    extent.batch_size = 1;
    extent.manifest_bytes = session::manifest_bytes(manifest);
    auto session = session::Session::create(extent, extent.ranks, 1);
    session::write_manifest(manifest, session.manifest());
    replica::store_initial(tensors, session, manifest);
    session.control().team.store(both);
    publish(session, published_);
    session.publish();
    return session;
  }
  static void publish(session::Session& session, std::uint64_t count) {
    session::BatchQueueWriter queue(session, 0);
    for (std::uint64_t i = 0; i < count; ++i) {
      std::fill_n(reinterpret_cast<float*>(queue.claim()), width, 1.0F);
      queue.publish(1);
    }
  }
  template <class Condition>
  static void wait_until(Condition condition) {
    for (const auto deadline = soon(); !condition() && !deadline.passed();) sched_yield();
  }
  /// Opens an attempt, and waits for the runner's vote.
  std::uint64_t open_until_voted(const session::Request& request) {
    const auto attempt = session::open_attempt(session_, request);
    wait_until([&] { return session_.word().mask != 0; });
    EXPECT_EQ(session_.word().mask, 1u);
    return attempt;
  }
  /// Opens an attempt, and ends it when the runner is in that phase. Then opens another one and waits for the
  /// runner's vote.
  void try_twice(
      session::Phase phase, const std::function<void()>& between = [] {}) {
    const session::Request request{.participants = both, .shares = session::even_shares(1), .batch_size = 1};
    const auto left = session::open_attempt(session_, request);
    const auto& record = session_.record(0);
    wait_until([&] { return record.phase == phase; });
    ASSERT_TRUE(session::abort_attempt(session_, left, 1));
    wait_until([&] { return record.acknowledged_attempt == left; });
    ASSERT_TRUE(session::close_if_over(session_, left));
    between();
    open_until_voted(request);
  }

  std::array<float, width> slab() const {
    std::array<float, width> values{};
    std::memcpy(values.data(), session_.slab(0), sizeof values);
    return values;
  }

  std::uint64_t published_;
  Config config_;
  session::Session session_ = make_session();
  base::UniqueFd lifeline_;
  ipc::Child child_;
};

/// One whose model waits, or whose queue has so many batches.
template <Product::Waits waits, std::uint64_t published = batches>
class RunnerThat : public RunnerTest {
 protected:
  RunnerThat() : RunnerTest(waits, published) {}
};

// The other rank's vote may still commit the attempt, which then needs this slab.
TEST_F(RunnerTest, ThatHasVotedLeavesItsSlabAsItIsWhenItsManagerIsGone) {
  const auto attempt =
      open_until_voted({.participants = both, .shares = session::even_shares(1), .batch_size = 1});
  const auto voted = slab();
  EXPECT_EQ(voted, (std::array<float, width>{0.5, 0.5, 0.5, 0.5}));
  lifeline_.reset();
  EXPECT_TRUE(ipc::wait_ended(child_.pidfd.get(), soon())) << "it does not end";
  EXPECT_EQ(slab(), voted);
  EXPECT_EQ(session_.word().attempt, attempt);
  EXPECT_EQ(session_.word().mask, 1u);
}

TEST_F(RunnerTest, SaysWhichMicroBatchIsTheLast) {
  open_until_voted({.participants = both, .shares = session::even_shares(2), .batch_size = 1});
  const auto& ballot = session_.record(0).ballot;
  ASSERT_EQ(ballot.scalars, 1u);
  EXPECT_EQ(ballot.scalar[0].sum, 2);
}

class SummingRunnerTest : public RunnerTest {
 protected:
  explicit SummingRunnerTest(const char* field = "last")
      : RunnerTest(Product::Waits::never, batches, {LossScaling::sum_over, field}) {}
  session::Request request() {
    return {.participants = both,
            .shares = session::even_shares(2),
            .batch_size = 1,
            .loss_weights = session::LossWeights::field};
  }
};

TEST_F(SummingRunnerTest, DividesByNothingAndVotesWithTheWeight) {
  open_until_voted(request());
  EXPECT_EQ(session_.record(0).ballot.weight, 2);
  EXPECT_EQ(session_.record(0).ballot.loss, 8);
}

class WeightlessRunnerTest : public SummingRunnerTest {
 protected:
  WeightlessRunnerTest() : SummingRunnerTest("tokens") {}
};

TEST_F(WeightlessRunnerTest, RefusesOutputsWithoutTheNumber) {
  const auto attempt = session::open_attempt(session_, request());
  wait_until([&] { return session_.word().abort; });
  const auto& record = session_.record(0);
  EXPECT_EQ(record.reason_attempt, attempt);
  EXPECT_EQ(record.reason, session::Reason::model_error);
  EXPECT_NE(std::string(record.error).find("no number 'tokens', by whose total"), std::string::npos);
}

TEST_F(RunnerTest, ComputesItsShareAndDividesByTheMicroBatchesOfAll) {
  open_until_voted({.participants = both, .shares = {{1, 4, 100}}, .batch_size = 1});
  EXPECT_EQ(session_.record(0).ballot.micro_batches, 1u);
  EXPECT_EQ(slab(), (std::array<float, width>{0.2F, 0.2F, 0.2F, 0.2F}));
}

using BusyRunnerTest = RunnerThat<Product::Waits::always>;

// The slab lacks this rank's gradient. If the rank voted, the attempt could be committed without it.
TEST_F(BusyRunnerTest, ThatLeftWhatItComputedWhenItsManagerIsGoneVotesForNothing) {
  session::open_attempt(session_, {.participants = both, .shares = session::even_shares(1), .batch_size = 1});
  const auto& phase = session_.record(0).phase;
  wait_until([&] { return phase == session::Phase::backward; });
  lifeline_.reset();
  EXPECT_TRUE(ipc::wait_ended(child_.pidfd.get(), soon())) << "it does not end";
  EXPECT_EQ(session_.word().mask, 0u);
}

using LeavingRunnerTest = RunnerThat<Product::Waits::once>;

// A team of devices may have left the upload in the middle, together with the attempt.
TEST_F(LeavingRunnerTest, LoadsTheParametersAgainAfterAnAttemptThatItLeft) {
  try_twice(session::Phase::backward);
  EXPECT_STREQ(session_.record(0).ballot.scalar[0].name, "last, of parameters that were loaded again");
}

using EmptyRunnerTest = RunnerThat<Product::Waits::never, 0>;

// A device may load parameters with the first batch, and none came.
TEST_F(EmptyRunnerTest, LoadsTheParametersAgainAfterAnAttemptThatEndedBeforeABatchCame) {
  try_twice(session::Phase::data, [this] { publish(session_, 1); });
  EXPECT_STREQ(session_.record(0).ballot.scalar[0].name, "last, of parameters that were loaded again");
}

}  // namespace
}  // namespace accelmgr::runner
