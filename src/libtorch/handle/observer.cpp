#include "engine/client/observer.hpp"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "accelmgr/observer.hpp"
#include "engine/replica/model.hpp"
#include "libtorch/tensor/convert.hpp"
#include "libtorch/tensor/torch_version.hpp"

namespace accelmgr {

struct Observer::State {
  client::Observer observer;
};

Observer::Observer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Observer::Observer(Observer&&) noexcept = default;
Observer& Observer::operator=(Observer&&) noexcept = default;
Observer::~Observer() = default;

Observer Observer::attach(const std::string& service, double timeout_s) {
  tensor::check_torch_version();
  return Observer(std::unique_ptr<State>(new State{client::Observer::attach(service, timeout_s)}));
}

bool Observer::has_ended() const noexcept { return state_->observer.has_ended(); }
Statistics Observer::statistics() const { return state_->observer.statistics(); }
std::optional<StepResult> Observer::last_step() const { return state_->observer.last_step(); }
std::optional<StepResult> Observer::next_step(double timeout_s) {
  return state_->observer.next_step(timeout_s);
}

ParameterCopy Observer::parameters(double timeout_s) const {
  const auto& manifest = state_->observer.manifest();
  const auto copy = state_->observer.parameters(timeout_s);
  const auto places = replica::places_of(copy.values.get(), manifest);
  ParameterCopy out{.version = copy.version, .step = copy.step};
  for (std::size_t i = 0; i < places.size(); ++i)
    out.tensors.push_back(
        {manifest.tensors[i].name,
         at::from_blob(
             places[i].data, manifest.tensors[i].shape, places[i].strides, [values = copy.values](void*) {},
             at::TensorOptions().dtype(tensor::scalar_type(manifest.tensors[i].dtype)))});
  return out;
}

}  // namespace accelmgr
