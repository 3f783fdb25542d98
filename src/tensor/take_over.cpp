#include "tensor/take_over.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>

#include "session/kernels.hpp"

namespace accelmgr::tensor {

struct TakeOver::State {
  const session::Session* session;
  std::vector<session::TensorEntry> entries;
  int rank;
  std::uint64_t attempt = 0;
  std::size_t nonfinite = none;
  static constexpr std::size_t none = ~std::size_t{0};

  void take(std::size_t index, const at::Tensor& gradient);
};

namespace {

// A slab beyond this is not read again before the reduction: storing past the cache leaves it to backward.
constexpr std::uint64_t non_temporal_bytes = std::uint64_t{1} << 20;

}  // namespace

void TakeOver::State::take(std::size_t index, const at::Tensor& gradient) {
  const auto& entry = entries[index];
  const auto& header = session->header();
  at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (!dense.is_contiguous()) dense = dense.contiguous();
  const session::ElementTypes types{header.element, header.slab_element};
  auto* slab = session->slab(rank) + entry.first * session::slab_bytes_of(types);
  auto& tag = session->tags(rank)[index];
  const auto& kernels = session::best_kernels();
  bool finite = false;
  if (tag.load(std::memory_order_relaxed) != attempt) {
    finite = kernels.take_over_copy(slab, dense.const_data_ptr(), entry.count, types, non_temporal_bytes);
    tag.store(attempt, std::memory_order_relaxed);
  } else {
    finite = kernels.take_over_add(slab, dense.const_data_ptr(), entry.count, types);
  }
  if (!finite && nonfinite == none) nonfinite = index;
}

TakeOver::TakeOver(const session::Session& session, const session::Manifest& manifest,
                   const ModelTensors& model, int rank)
    : state_(std::make_shared<State>()) {
  state_->session = &session;
  state_->entries = manifest.tensors;
  state_->rank = rank;

  class Hook : public torch::autograd::PostAccumulateGradHook {
   public:
    Hook(std::shared_ptr<State> state, std::size_t index) : state_(std::move(state)), index_(index) {}
    void operator()(const torch::autograd::Variable& parameter) override {
      state_->take(index_, parameter.grad());
      parameter.mutable_grad().reset();
    }

   private:
    std::shared_ptr<State> state_;
    std::size_t index_;
  };
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const auto& parameter = model.parameters[i].tensor;
    if (parameter.requires_grad())
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(state_, i));
  }
}

TakeOver::~TakeOver() = default;

void TakeOver::begin(std::uint64_t attempt) noexcept {
  state_->attempt = attempt;
  state_->nonfinite = State::none;
}

std::string TakeOver::nonfinite() const {
  return state_->nonfinite == State::none ? std::string() : state_->entries[state_->nonfinite].name;
}

}  // namespace accelmgr::tensor
