// Whole systems whose runners are a team of CUDA devices, with fakes of driver, CUDA and NCCL and torch's CPU
// as the device: they train as runners in host memory do, but for rounding, also when a runner is lost.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "engine/replica/replica.hpp"
#include "engine/support/fake_nccl.hpp"
#include "libtorch/handle/cuda_rig.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

std::string summed;  ///< A file that a runner makes when it has summed up gradients over NCCL.

device::NcclCode reduce_scatter(const void* from, void* to, std::size_t count, device::NcclType type,
                                device::NcclOperation operation, device::CommunicatorHandle handle,
                                device::StreamHandle stream) {
  std::ofstream(summed).put('1');
  return FakeNccl::table().reduce_scatter(from, to, count, type, operation, handle, stream);
}

device::Nccl telling_nccl() {
  FakeNccl::of_process();
  auto nccl = FakeNccl::table();
  nccl.reduce_scatter = reduce_scatter;
  return nccl;
}

/// A replica on what `runners.device` of its rank says.
std::unique_ptr<replica::Replica> make(const Config& config, replica::Role role) {
  if (!role.computes()) tensor::seed_generator(config.seed_base);
  auto model = make_model(config);
  model->train(role.computes());
  at::set_num_threads(1);  // For sums in one order.
  if (!role.computes() || config.runners.device != accelmgr::Device::cuda)
    return std::make_unique<libtorch::Replica>(config, std::move(model));
  summed = config.model.options.at("folder") + "/" + std::to_string(role.rank);
  static FakeCuda fake(FakeCuda::Execution::threads, static_cast<std::uint64_t>(role.rank));
  fake.take_any_memory();
  return std::make_unique<libtorch::CudaReplica>(config, std::make_unique<LateModel>(std::move(model), fake),
                                                 at::Device(at::kCPU), FakeCuda::runtime(), telling_nccl);
}

// The manager and the runners are this program too, so the factory is registered before main() begins.
const bool registered = [] {
  for (const char* kind : {"convnet", "gpt"}) replica::register_factory(kind, make);
  return true;
}();

struct Trained {
  std::vector<at::Tensor> gradients;  ///< All of each step, as one tensor; then the buffers, likewise.
  std::vector<double> losses;
  std::uint64_t lost_runners = 0;
};

at::Tensor joined(const std::vector<NamedTensor>& tensors) {
  std::vector<at::Tensor> flat{at::ones({1})};
  for (const auto& tensor : copies(tensors)) flat.push_back(tensor.reshape({-1}).to(at::kFloat));
  return at::cat(flat);
}

/// The parameters do not follow the gradients, so rounding does not grow.
Trained train(const Config& config) {
  auto manager = Manager::start(config);
  Trained trained;
  for (int step = 0; step < 4; ++step) {
    trained.losses.push_back(expect_ok(manager).loss);
    trained.gradients.push_back(joined(manager.gradients()));
    const auto writing = manager.writing();
    for (const auto& group : manager.groups()) group.parameters.mul_(0.99);
  }
  trained.gradients.push_back(joined(manager.buffers()));
  trained.lost_runners = manager.statistics().losses;
  return trained;
}

void expect_close(const Trained& trained, const Trained& expected) {
  EXPECT_EQ(trained.losses, expected.losses);
  EXPECT_LE(distance(trained.gradients, expected.gradients), 1e-5);
}

class CudaTeam : public testing::TestWithParam<const char*> {
 protected:
  static Config in_host_memory() {
    auto config = small_config(GetParam());
    config.nprocs = 3;
    config.grad_accumulation_steps = 2;
    config.model.gpt.dropout = 0.2;
    return config;
  }
  Config on_gpus() const {
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv("FAKE_DRIVER_GPUS", "3", 1);
    auto config = in_host_memory();
    config.runners.device = accelmgr::Device::cuda;
    config.runners.nccl = NcclUse::automatic;
    config.model.options["folder"] = folder_.path();
    return config;
  }
  bool has_summed(int rank) const { return std::filesystem::exists(folder_ / std::to_string(rank)); }

 private:
  TemporaryFolder folder_;
};

TEST_P(CudaTeam, TrainsAsRunnersInHostMemoryDo) {
  ASSERT_TRUE(registered);
  expect_close(train(on_gpus()), train(in_host_memory()));
  for (const int rank : {0, 1, 2}) EXPECT_TRUE(has_summed(rank));
}

TEST_P(CudaTeam, ThatLosesARankIsMadeAnewAndTheStepRepeated) {
  const auto expected = train(in_host_memory());
  for (const char* phase : {"backward", "gradient_capture", "vote"}) {
    auto config = on_gpus();
    config.runners.on_loss = LossPolicy::restart;
    config.runners.restart_backoff = 0;
    config.faults = {std::string("rank=1 step=3 fault=kill phase=") + phase};
    const auto trained = train(config);
    EXPECT_EQ(trained.lost_runners, 1u) << phase;
    expect_close(trained, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaTeam, testing::Values("convnet", "gpt"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace accelmgr::test
