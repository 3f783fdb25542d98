#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "accelmgr/multiprocess.hpp"

namespace accelmgr {
namespace {

/// Moves all tensors or none. Tensors that are the same view of one memory (tied weights) stay so.
class Move {
 public:
  explicit Move(at::Device device) : device_(device) {}

  void add(const NamedTensor& named) {
    if (named.tensor.device() == device_) return;
    const auto from = named.tensor.detach();
    const auto same = std::find_if(moved_.begin(), moved_.end(), [&](const Moved& other) {
      return other.from.is_alias_of(from) && other.from.storage_offset() == from.storage_offset() &&
             other.from.sizes() == from.sizes() && other.from.strides() == from.strides();
    });
    auto to = same == moved_.end() ? copy(named.name, from) : same->to;
    moved_.push_back({named.tensor, from, std::move(to)});
  }

  void apply() {
    for (auto& moved : moved_) moved.tensor.set_data(moved.to);
  }

 private:
  struct Moved {
    at::Tensor tensor, from, to;
  };

  at::Tensor copy(const std::string& name, const at::Tensor& from) const {
    try {
      return from.to(device_);
    } catch (const c10::Error& error) {
      throw ModelError(fmt::format("ModelWrapper: '{}' cannot be moved to {}: {}", name, device_.str(),
                                   error.what_without_backtrace()));
    }
  }

  at::Device device_;
  std::vector<Moved> moved_;
};

}  // namespace

ModelWrapper::ModelWrapper(std::shared_ptr<Model> model) : model_(std::move(model)), turn_("model wrapper") {
  if (!model_) throw UsageError("ModelWrapper: no model was passed");
}

Model& ModelWrapper::to(at::Device device) {
  turn_.run([&] {
    const at::NoGradGuard no_grad;
    Move move(device);
    for (const auto& parameter : model_->parameters()) move.add(parameter);
    for (const auto& buffer : model_->buffers()) move.add(buffer);
    move.apply();
  });
  return *model_;
}

}  // namespace accelmgr
