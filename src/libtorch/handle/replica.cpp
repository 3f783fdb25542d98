#include "libtorch/handle/replica.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <utility>

#include "accelmgr/errors.hpp"
#include "base/config/device_name.hpp"
#include "base/log.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/replica/generator_state.hpp"
#include "engine/runner/rank_setup.hpp"
#include "libtorch/handle/cuda.hpp"
#include "libtorch/handle/cuda_replica.hpp"
#include "libtorch/tensor/convert.hpp"
#include "libtorch/tensor/generator.hpp"

namespace accelmgr::libtorch {
namespace {

/// Copies the fields: the model may write into its batch or keep it, and a repeated step needs the original.
Batch batch_of(std::span<const replica::Field> fields) {
  std::vector<NamedTensor> tensors;
  tensors.reserve(fields.size());
  for (const auto& field : fields)
    tensors.push_back(
        {field.name, tensor::view(const_cast<std::byte*>(field.data), field.dtype, field.shape).clone()});
  return Batch(std::move(tensors));
}

void open(const Config&, replica::Role) {
  load_cuda();
  const device::Device device(cuda_runtime(), 0);
  device.allocate(1);  // Makes the context, if choosing the device did not.
}

/// In the manager the model is on the CPU whatever runners compute on.
std::unique_ptr<replica::Replica> make(const Config& config, replica::Role role) {
  if (config.runners.device == Device::xla || config.runners.device == Device::accelerator)
    throw ConfigError(fmt::format("runners.device is {0}, but model.kind '{1}' is computed by libtorch in "
                                  "C++, on the CPU or a GPU; "
                                  "{0} is for models of Python: pass a torch.nn.Module to accelmgr.Manager, "
                                  "or use model.kind python",
                                  config::name_of(config.runners.device), config.model.kind),
                      "runners.device");
  const bool on_cuda = role.computes() && config.runners.device == Device::cuda;
  if (on_cuda && config.runners.cuda_graph != CudaGraph::off)
    base::log().warn(
        "runners.cuda_graph is for models of Python; model.kind '{}', which libtorch computes in C++, does "
        "without",
        config.model.kind);
  if (!role.computes()) {
    tensor::seed_generator(config.seed_base);
  } else {
    at::set_num_threads(runner::compute_threads(config));
    at::globalContext().setDeterministicAlgorithms(config.deterministic, /*warn_only=*/true);
  }
  auto model = make_model(config);
  if (role.computes()) model->train(true);
  if (on_cuda)
    return std::make_unique<CudaReplica>(config, std::move(model), at::Device(at::kCUDA, 0), cuda_runtime(),
                                         nccl);
  return std::make_unique<Replica>(config, std::move(model));
}

}  // namespace

bool register_replica() {
  replica::register_factory("", make, open);
  manager::at_begin([] { at::set_num_threads(1); });
  return true;
}

Replica::Replica(const Config& config, std::unique_ptr<Model> model) : model_(config, std::move(model)) {}

void Replica::bind(const replica::Binding& to) {
  binding_.emplace(to);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < model_.parameters().size(); ++i) {
    const auto& parameter = model_.parameters()[i].tensor;
    const auto& entry = to.manifest.tensors[i];
    model_.place_parameter(
        i, tensor::view(to.places[i].data, entry.runner_dtype, entry.shape, to.places[i].strides));
    tensors.push_back(parameter);
  }
  hooks_.emplace(std::move(tensors), to.gradients);
}

void Replica::seed(std::uint64_t seed) { tensor::seed_generator(seed); }

void Replica::begin_attempt() {
  hooks_->begin();
  numbers_.clear();
}

void Replica::run(std::span<const replica::Field> batch, double divisor) {
  in_model([&] {
    hooks_->begin_micro_batch();
    const auto outputs = model_.forward(batch_of(batch), divisor, at::kCPU);
    numbers_.add(outputs, divisor);
    binding_->progress.backward_begins();
    hooks_->begin_backward();
    outputs.loss.backward();
    hooks_->end_backward();
  });
}

replica::Totals Replica::collect() {
  return in_model([&] {
    hooks_->finish();
    model_.check_places();
    std::vector<double> values;
    for (const auto& tensor : numbers_.tensors()) values.push_back(tensor.item().toDouble());
    return numbers_.totals(values);
  });
}

void Replica::save(const replica::State& to) {
  in_model([&] {
    if (to.buffers != nullptr) {
      model_.restore_buffers();
      for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
        const auto& entry = binding_->manifest.buffers[i];
        tensor::view(to.buffers + entry.offset, entry.dtype, entry.shape).copy_(model_.buffers()[i].tensor);
      }
    }
    tensor::store_generator(to.generator);
  });
}

void Replica::load(const replica::ConstState& from) {
  in_model([&] {
    model_.restore_buffers();
    for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
      const auto& entry = binding_->manifest.buffers[i];
      model_.buffers()[i].tensor.copy_(
          tensor::view(const_cast<std::byte*>(from.buffers) + entry.offset, entry.dtype, entry.shape));
    }
    tensor::load_generator(from.generator);
  });
}

}  // namespace accelmgr::libtorch
