// Whole systems whose runners compute on the transport for CUDA devices, with a fake of CUDA that copies late
// and torch's CPU as the device: they train as runners in host memory do, also when a runner is lost.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "engine/replica/replica.hpp"
#include "libtorch/handle/cuda_rig.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

/// With the option `device` of the model: a replica on the fake. The manager's is on the CPU, as for any
/// device.
std::unique_ptr<replica::Replica> make_on_fake(const Config& config, replica::Role role) {
  if (!role.computes()) tensor::seed_generator(config.seed_base);
  auto model = make_model(config);
  model->train(role.computes());
  at::set_num_threads(1);  // For sums in one order.
  if (!role.computes() || !config.model.options.contains("device"))
    return std::make_unique<libtorch::Replica>(config, std::move(model));
  static FakeCuda fake(FakeCuda::Execution::threads, static_cast<std::uint64_t>(role.rank));
  fake.take_any_memory();
  return std::make_unique<libtorch::CudaReplica>(config, std::make_unique<LateModel>(std::move(model), fake),
                                                 at::Device(at::kCPU), FakeCuda::runtime());
}

// The manager and the runners are this program too, so the factory is registered before main() begins.
const bool registered = [] {
  for (const char* kind : {"convnet", "gpt"}) replica::register_factory(kind, make_on_fake);
  return true;
}();

struct Trained {
  std::vector<at::Tensor> tensors;
  std::vector<double> losses;
  std::uint64_t lost_runners = 0;
};

Trained train(const Config& config) {
  auto manager = Manager::start(config);
  Trained trained;
  for (int step = 0; step < 4; ++step) {
    trained.losses.push_back(expect_ok(manager).loss);
    for (const auto& gradient : copies(manager.gradients())) trained.tensors.push_back(gradient);
    const auto writing = manager.writing();
    for (const auto& group : manager.groups())
      if (group.kind != FlatGroup::Kind::frozen) group.parameters.sub_(group.gradients, 0.1);
  }
  for (const auto& buffer : copies(manager.buffers())) trained.tensors.push_back(buffer);
  trained.lost_runners = manager.statistics().losses;
  return trained;
}

void expect_same(const Trained& trained, const Trained& expected) {
  EXPECT_EQ(trained.losses, expected.losses);
  EXPECT_TRUE(same_bits(trained.tensors, expected.tensors));
}

class FakeCudaRunners : public testing::TestWithParam<const char*> {
 protected:
  static Config in_host_memory() {
    auto config = small_config(GetParam());
    config.grad_accumulation_steps = 3;
    config.model.gpt.dropout = 0.2;
    return config;
  }
  static Config on_fake() {
    auto config = in_host_memory();
    config.model.options["device"] = "fake";
    return config;
  }
};

TEST_P(FakeCudaRunners, TrainAsThoseInHostMemoryDo) {
  ASSERT_TRUE(registered);
  expect_same(train(on_fake()), train(in_host_memory()));
}

TEST_P(FakeCudaRunners, ThatAreLostAreReplacedAndTheStepHasTheSameBits) {
  const auto expected = train(in_host_memory());
  for (const char* phase : {"backward", "gradient_capture", "vote"}) {
    auto config = on_fake();
    config.runners.on_loss = LossPolicy::restart;
    config.runners.restart_backoff = 0;
    config.faults = {std::string("rank=1 step=3 fault=kill phase=") + phase};
    const auto trained = train(config);
    EXPECT_EQ(trained.lost_runners, 1u) << phase;
    expect_same(trained, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, FakeCudaRunners, testing::Values("convnet", "gpt"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace accelmgr::test
