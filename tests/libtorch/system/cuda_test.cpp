// Whole systems whose runners compute on the transport for CUDA devices, with fakes of driver and CUDA that
// copies late, and torch's CPU as the device: each alone, or as a team with a fake of NCCL. They train as
// runners in CPU memory do, also when a runner is lost; a team but for rounding.
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

struct Outcome {
  std::vector<std::vector<at::Tensor>> tensors;  ///< The gradients of each step; then the buffers.
  std::vector<double> losses;
  std::uint64_t lost_runners = 0;
};

class CudaRunners : public testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  static bool are_team() { return std::get<bool>(GetParam()); }
  static Config in_host_memory() {
    auto config = small_config(std::get<const char*>(GetParam()));
    config.nprocs = 3;
    config.grad_accumulation_steps = 3;
    config.model.gpt.dropout = 0.2;
    return config;
  }
  Config on_gpus() const {
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv("FAKE_DRIVER_GPUS", "3", 1);
    auto config = in_host_memory();
    config.runners.device = accelmgr::Device::cuda;
    config.runners.nccl = are_team() ? NcclUse::automatic : NcclUse::off;
    config.model.options["folder"] = folder_.path();
    return config;
  }
  bool has_summed(int rank) const { return std::filesystem::exists(folder_ / std::to_string(rank)); }

  /// The parameters of a team do not follow the gradients, so rounding does not grow.
  static Outcome train(const Config& config) {
    auto manager = Manager::start(config);
    Outcome trained;
    for (int step = 0; step < 4; ++step) {
      trained.losses.push_back(expect_ok(manager).loss);
      trained.tensors.push_back(copies(manager.gradients()));
      const auto writing = manager.writing();
      for (const auto& group : manager.groups()) {
        if (are_team())
          group.parameters.mul_(0.99);
        else if (group.kind != FlatGroup::Kind::frozen)
          group.parameters.sub_(group.gradients, 0.1);
      }
    }
    trained.tensors.push_back(copies(manager.buffers()));
    trained.lost_runners = manager.statistics().losses;
    return trained;
  }

  static at::Tensor joined(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> flat{at::ones({1})};
    for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}).to(at::kFloat));
    return at::cat(flat);
  }
  static void expect_as_in_host_memory(const Outcome& trained, const Outcome& expected) {
    EXPECT_EQ(trained.losses, expected.losses);
    for (std::size_t i = 0; i < expected.tensors.size(); ++i) {
      if (are_team())
        EXPECT_LE(distance({joined(trained.tensors[i])}, {joined(expected.tensors[i])}), 1e-5) << i;
      else
        EXPECT_TRUE(same_bits(trained.tensors[i], expected.tensors[i])) << i;
    }
  }

 private:
  TemporaryFolder folder_;
};

TEST_P(CudaRunners, TrainAsThoseInHostMemoryDo) {
  ASSERT_TRUE(registered);
  expect_as_in_host_memory(train(on_gpus()), train(in_host_memory()));
  for (const int rank : {0, 1, 2}) EXPECT_EQ(has_summed(rank), are_team());
}

TEST_P(CudaRunners, ThatLoseOneReplaceItAndRepeatTheStep) {
  const auto expected = train(in_host_memory());
  for (const char* phase : {"backward", "gradient_capture", "vote"}) {
    auto config = on_gpus();
    config.runners.on_loss = LossPolicy::restart;
    config.runners.restart_backoff = 0;
    config.faults = {std::string("rank=1 step=3 fault=kill phase=") + phase};
    const auto trained = train(config);
    EXPECT_EQ(trained.lost_runners, 1u) << phase;
    expect_as_in_host_memory(trained, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaRunners,
                         testing::Combine(testing::Values("convnet", "gpt"), testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_team" : "_alone");
                         });

}  // namespace
}  // namespace accelmgr::test
