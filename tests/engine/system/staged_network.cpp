// The staged model. It is a regression with the kinds of state in which an aborted step must leave no trace:
// BatchNorm's buffers, and the generator through dropout. It does what its script says.
#include <unistd.h>

#include <limits>
#include <stdexcept>

#include "engine/support/fake_device_replica.hpp"
#include "engine/support/layers.hpp"
#include "engine/support/mixed_dtypes.hpp"
#include "engine/support/plain_replica.hpp"
#include "nccl_faults.hpp"
#include "stage.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t inputs = 8;

class StagedNetwork final : public Network {
 public:
  explicit StagedNetwork(const Config& config)
      : map_(open_script(config.model.options.at("stage"))), nprocs_(config.nprocs) {
    if (config.model.options.contains("forks_in_factory")) fork_apart();
    wait_for_release();
    const std::int64_t width = std::stoll(option_of(config.model.options, "hidden", "16"));
    std::mt19937_64 values(config.seed_base);
    fill_normal<float>(add_parameter("hidden.weight", DType::float32, {width, inputs}), 1, values);
    fill<float>(add_parameter("norm.weight", DType::float32, {width}), 1);
    add_parameter("norm.bias", DType::float32, {width});
    fill_normal<float>(add_parameter("output.weight", DType::float32, {1, width}), 1, values);
    add_parameter("output.bias", DType::float32, {1});
    add_buffer("norm.running_mean", DType::float32, {width});
    fill<float>(add_buffer("norm.running_var", DType::float32, {width}), 1);
  }

  Output forward(std::span<const replica::Field> batch) override {
    input_ = matrix_of<float>(field_of(batch, "input"));
    const auto hidden = linear(input_, values(hidden_weight));
    const auto norm = norm_.forward(hidden, values(norm_weight), values(norm_bias), running(0), running(1));
    dropped_ = dropout(norm, 0.3, generator(), mask_);
    apart_ = linear(dropped_, values(output_weight));
    add_bias(apart_, values(output_bias));
    const auto target = matrix_of<float>(field_of(batch, "target"));
    float squares = 0;
    for (std::size_t i = 0; i < apart_.values.size(); ++i) {
      apart_.values[i] -= target.values[i];
      squares += apart_.values[i] * apart_.values[i];
    }
    Output output{.loss = squares / float(apart_.values.size())};
    // Element i is assigned to device i mod nprocs.
    const auto first = *reinterpret_cast<const std::int64_t*>(field_of(batch, "index").data);
    act_ = act_of(static_cast<int>(first % nprocs_));
    if (act_ == Act::infinite_loss) output.loss += std::numeric_limits<double>::infinity();
    act();
    return output;
  }

  void backward(double scale) override {
    for (auto& parameter : parameters())
      std::fill(parameter.gradient.begin(), parameter.gradient.end(), std::byte{0});
    auto d = apart_;
    for (auto& value : d.values) value *= float(2 * scale / double(d.values.size()));
    bias_backward(d, gradient(output_bias));
    d = linear_backward(d, dropped_, values(output_weight), gradient(output_weight));
    d = dropout_backward(std::move(d), mask_);
    d = norm_.backward(d, values(norm_weight), gradient(norm_weight), gradient(norm_bias));
    linear_backward(d, input_, values(hidden_weight), gradient(hidden_weight));
    if (act_ == Act::undefined_gradient)
      gradient(output_bias)(0, 0) = std::numeric_limits<float>::quiet_NaN();
  }

 private:
  enum Parameter : std::size_t { hidden_weight, norm_weight, norm_bias, output_weight, output_bias };

  View<float> values(Parameter p) { return values_of<float>(parameters()[p]); }
  View<float> gradient(Parameter p) { return gradient_of<float>(parameters()[p]); }
  View<float> running(std::size_t buffer) { return values_of<float>(buffers()[buffer]); }

  void wait_for_release() {
    auto& script = script_in(map_);
    for (auto seen = ipc::load(script.told); script.factories_held.load(); seen = ipc::load(script.told)) {
      script.in_factory.store(getpid());
      ipc::advance(script.heard);
      ipc::wait_changed(script.told, seen, stage_slice_ns, 0);
    }
  }

  /// The first process that makes the model does this: the manager.
  void fork_apart() {
    auto& script = script_in(map_);
    if (script.child_of_model.load() != 0) return;
    fork_child(script, script.child_of_model, /*apart=*/true);
  }

  Act act_of(int rank) {
    auto& script = script_in(map_);
    if (const auto once = script.once[rank].exchange(Act::compute); once != Act::compute) return once;
    if (script.act[rank].load() != Act::block) return script.act[rank].load();
    script.blocked[rank].store(true);
    ipc::advance(script.heard);
    while (!cancelled()) {
      const auto seen = ipc::load(script.told);
      if (script.act[rank].load() != Act::block) break;
      ipc::wait_changed(script.told, seen, stage_slice_ns, 0);
    }
    script.blocked[rank].store(false);
    return script.act[rank].load();
  }

  void act() {
    auto& script = script_in(map_);
    switch (act_) {
      case Act::throw_exception:
        throw std::runtime_error("the stage collapsed");
      case Act::write_parameter:
        values(output_bias)(0, 0) += 1;
        break;
      case Act::fork_child:
        fork_child(script, script.child_of_model);
        break;
      case Act::execute_child:
        execute_child(script, script.child_of_model);
        break;
      default:
        break;
    }
  }

  ipc::Mapping map_;
  int nprocs_;
  // Results of the last forward().
  Act act_ = Act::compute;
  Matrix<float> input_, dropped_, mask_, apart_;
  BatchNorm<float> norm_;
};

const RegisteredReplica model(staged, [](const Config& config, replica::Role) {
  return std::make_unique<PlainReplica>(std::make_unique<StagedNetwork>(config));
});
std::unique_ptr<Network> mixed_network(const Config& config) {
  return with_dtypes(std::make_unique<StagedNetwork>(config),
                     {DType::bfloat16, DType::complex64, DType::float16, DType::float32, DType::float64});
}
const RegisteredReplica mixed(mixed_dtypes, [](const Config& config, replica::Role) {
  return std::make_unique<PlainReplica>(mixed_network(config));
});
const RegisteredReplica mixed_on_device(mixed_dtypes_on_fake_device, [](const Config& config, replica::Role) {
  return std::make_unique<FakeDeviceReplica>(mixed_network(config));
});

const RegisteredReplica on_fake_device(staged_on_fake_device, [](const Config& config, replica::Role) {
  return std::make_unique<FakeDeviceReplica>(std::make_unique<StagedNetwork>(config));
});

const RegisteredReplica by_device(
    staged_by_device, [](const Config& config, replica::Role role) -> std::unique_ptr<replica::Replica> {
      auto network = std::make_unique<StagedNetwork>(config);
      if (!role.computes() || config.runners.device != accelmgr::Device::cuda)
        return std::make_unique<PlainReplica>(std::move(network));
      auto replica = std::make_unique<FakeDeviceReplica>(std::move(network));
      replica->use_nccl([config, role] { return nccl_of_rank(config, role.rank); });
      return replica;
    });

}  // namespace
}  // namespace accelmgr::test
