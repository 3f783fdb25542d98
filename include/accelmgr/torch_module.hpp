// Makes a Model of a torch::nn::Module. Header-only; the program includes torch/torch.h itself.
//
//   struct Net : torch::nn::Module { accelmgr::Outputs forward(const accelmgr::Batch& batch); ... };
//   accelmgr::register_model("net", [](const accelmgr::Config&) {
//     return std::make_unique<accelmgr::TorchModule<Net>>(std::make_shared<Net>());
//   });
#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"

namespace accelmgr {

/// What TorchModule needs: a torch::nn::Module with a forward() from batch to outputs.
template <class Module>
concept TorchModuleLike = requires(Module& module, const Batch& batch) {
  module.named_parameters(/*recurse=*/true);
  module.named_buffers(/*recurse=*/true);
  module.train(true);
  { module.forward(batch) } -> std::same_as<Outputs>;
};

/// Wraps a module. The module must register every parameter and buffer that forward() uses, and must not
/// replace them; replacing a parameter fails the step. Parameters with several names (tied weights) are
/// listed under each. One thread uses it, as every Model.
template <TorchModuleLike Module>
class TorchModule : public Model {
 public:
  /// Throws ModelError when `module` is null.
  explicit TorchModule(std::shared_ptr<Module> module) : module_(std::move(module)) {
    if (!module_) throw ModelError("TorchModule: the module is null");
    for (const auto& item : module_->named_buffers(true)) buffers_.push_back({item.key(), item.value()});
  }

  std::vector<NamedTensor> parameters() override {
    std::vector<NamedTensor> parameters;
    for (const auto& item : module_->named_parameters(true)) parameters.push_back({item.key(), item.value()});
    return parameters;
  }
  std::vector<NamedTensor> buffers() override { return buffers_; }
  Outputs forward(const Batch& batch) override { return module_->forward(batch); }
  void train(bool on) override { module_->train(on); }

  Module& module() noexcept { return *module_; }

 private:
  std::shared_ptr<Module> module_;
  std::vector<NamedTensor> buffers_;
};

}  // namespace accelmgr
