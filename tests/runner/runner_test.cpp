// A runner by itself: the test is its manager, its host and the other rank.
#include "runner/runner.hpp"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <cstring>

#include "data/loader.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"
#include "model/layers.hpp"
#include "session/attempt.hpp"
#include "session/batch_queue.hpp"
#include "tensor/master.hpp"

namespace accelmgr::runner {
namespace {

constexpr std::int64_t width = 4;
constexpr session::RankMask both = 3;

base::Deadline soon() { return base::Deadline::in_seconds(30); }

/// Its gradient is the batch.
class Product final : public model::ParameterModel {
 public:
  Product() { weight_ = parameter("weight", at::ones({width})); }
  Outputs forward(const Batch& batch) override { return {batch["input"].mul(weight_).sum(), {}}; }

 private:
  at::Tensor weight_;
};

/// Rank 0 of two, which computes on one batch of ones.
class RunnerTest : public testing::Test {
 protected:
  RunnerTest() {
    static const bool registered =
        (register_model("product", [](const Config&) { return std::make_unique<Product>(); }), true);
    static_cast<void>(registered);
    config_.model.kind = "product";
    config_.nprocs = 2;
    config_.runners.threads = 1;
    auto [ours, theirs] = ipc::socket_pair();
    lifeline_ = std::move(ours);
    child_ = ipc::fork_self([this, &theirs] {
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
    auto tensors = tensor::describe(model.parameters(), model.buffers());
    auto& manifest = tensors.manifest;
    const FieldSpec fields[] = {{"input", at::kFloat, {width}}};
    manifest.fields = data::field_entries(fields);
    session::Extent extent{.ranks = 2, .element = tensors.element};
    extent.elements = manifest.place_tensors(tensors.element);
    extent.tensors = manifest.tensors.size();
    extent.buffer_bytes = manifest.place_buffers();
    extent.slots = 1;
    extent.slot_bytes = manifest.place_fields(1);
    extent.manifest_bytes = session::manifest_bytes(manifest);
    auto session = session::Session::create(extent, extent.ranks, 1);
    session::write_manifest(manifest, session.manifest());
    tensor::master_view(session.parameters(), tensors.element, manifest.tensors[0]).fill_(1);
    session.control().team.store(both);
    session::BatchQueue queue(session, 0);
    tensor::flat_view(queue.claim(), session::Element::f32, 0, width).fill_(1);
    queue.publish(1);
    session.publish();
    return session;
  }

  at::Tensor slab() const { return tensor::flat_view(session_.slab(0), session::Element::f32, 0, width); }

  Config config_;
  session::Session session_ = make_session();
  base::UniqueFd lifeline_;
  ipc::Child child_;
};

// The other rank's vote may still commit what it has voted for.
TEST_F(RunnerTest, ThatHasVotedLeavesItsSlabAsItIsWhenItsManagerIsGone) {
  const auto attempt =
      session::open_attempt(session_, {.participants = both, .micro_batches = 1, .batch_size = 1});
  for (const auto deadline = soon(); session_.word().mask == 0 && !deadline.passed();) sched_yield();
  ASSERT_EQ(session_.word().mask, 1u);
  const auto voted = slab().clone();
  lifeline_.reset();
  EXPECT_TRUE(ipc::wait_ended(child_.pidfd.get(), soon())) << "it does not end";
  EXPECT_TRUE(slab().equal(voted)) << slab() << " instead of " << voted;
  EXPECT_EQ(session_.word().attempt, attempt);
  EXPECT_EQ(session_.word().mask, 1u);
}

}  // namespace
}  // namespace accelmgr::runner
