#include "tensor/take_over.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "base/fault_point.hpp"
#include "session/kernels.hpp"

namespace accelmgr::tensor {

struct TakeOver::State {
  const session::Session* session;
  std::vector<session::TensorEntry> entries;
  int rank;
  std::uint64_t attempt = 0;
  std::vector<std::size_t> nonfinite;
  std::vector<at::Tensor> parameters;

  void take(std::size_t index);
  std::byte* place_of(std::size_t index) const;
};

namespace {

// A large gradient is not read again before the reduction: storing past the cache leaves that to backward.
// But a slab that stays in the cache until the reduction is better left there.
constexpr std::uint64_t non_temporal_bytes = std::uint64_t{1} << 20;
constexpr std::uint64_t cached_slab_bytes = std::uint64_t{8} << 20;

std::size_t non_temporal_from(const session::Header& header) {
  return header.slab_bytes > cached_slab_bytes ? non_temporal_bytes : std::numeric_limits<std::size_t>::max();
}

}  // namespace

void TakeOver::State::take(std::size_t index) {
  const auto& parameter = parameters[index];
  at::Tensor dense = parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad();
  parameter.mutable_grad().reset();
  if (!dense.is_contiguous()) dense = dense.contiguous();
  const auto& header = session->header();
  const session::ElementTypes types{header.element, header.slab_element};
  const auto& kernels = session::best_kernels();
  const auto count = entries[index].count;
  auto* place = place_of(index);
  auto& tag = session->tags(rank)[index];
  bool finite = false;
  if (tag.load(std::memory_order_relaxed) != attempt) {
    finite = kernels.take_over_copy(place, dense.const_data_ptr(), count, types, non_temporal_from(header));
  } else {
    finite = kernels.take_over_add(place, dense.const_data_ptr(), count, types);
  }
  base::fault_point(base::FaultPhase::take_over);
  tag.store(attempt, std::memory_order_relaxed);
  if (!finite && std::find(nonfinite.begin(), nonfinite.end(), index) == nonfinite.end())
    nonfinite.push_back(index);
}

std::byte* TakeOver::State::place_of(std::size_t index) const {
  const auto& header = session->header();
  return session->slab(rank) +
         entries[index].first * session::slab_bytes_of({header.element, header.slab_element});
}

TakeOver::TakeOver(const session::Session& session, const session::Manifest& manifest,
                   const ModelTensors& model, int rank)
    : state_(std::make_shared<State>()) {
  state_->session = &session;
  state_->entries = manifest.tensors;
  state_->rank = rank;
  for (const auto& parameter : model.parameters) state_->parameters.push_back(parameter.tensor);

  // The state holds the parameters, and they their hooks: so these do not hold the state.
  class Hook : public torch::autograd::PostAccumulateGradHook {
   public:
    Hook(const std::shared_ptr<State>& state, std::size_t index,
         std::unique_ptr<PostAccumulateGradHook> before)
        : state_(state), index_(index), before_(std::move(before)) {}
    void operator()(const torch::autograd::Variable& parameter) override {
      if (before_)
        (*before_)(parameter);  // The model's own hook: .grad stays until finish().
      else if (const auto state = state_.lock())
        state->take(index_);
    }

   private:
    std::weak_ptr<State> state_;
    std::size_t index_;
    std::unique_ptr<PostAccumulateGradHook> before_;
  };
  namespace autograd = torch::autograd::impl;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const auto& parameter = model.parameters[i].tensor;
    autograd::materialize_autograd_meta(parameter);
    auto before = std::move(autograd::post_acc_grad_hooks(parameter));
    autograd::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(state_, i, std::move(before)));
  }
}

TakeOver::~TakeOver() = default;

void TakeOver::begin(std::uint64_t attempt) {
  state_->attempt = attempt;
  state_->nonfinite.clear();
  for (const auto& parameter : state_->parameters)  // Of an attempt that was given up.
    if (parameter.grad().defined()) parameter.mutable_grad().reset();
}

void TakeOver::backward(const at::Tensor& loss) { loss.backward(); }

void TakeOver::finish() {
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    if (state_->parameters[i].grad().defined()) state_->take(i);
}

std::vector<std::string> TakeOver::nonfinite() const {
  std::vector<std::string> names;
  for (const auto index : state_->nonfinite) names.push_back(state_->entries[index].name);
  return names;
}

}  // namespace accelmgr::tensor
