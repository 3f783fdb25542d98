#include "tensor/take_over.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>

#include "base/fault_point.hpp"
#include "session/kernels.hpp"
#include "tensor/slab_allocator.hpp"

namespace accelmgr::tensor {

struct TakeOver::State {
  const session::Session* session;
  std::vector<session::TensorEntry> entries;
  int rank;
  std::uint64_t attempt = 0;
  std::vector<std::size_t> nonfinite;
  SlabAllocator* allocator = nullptr;  ///< Null when slabs have another dtype than gradients.
  std::vector<std::pair<std::size_t, at::Tensor>>
      waiting;  ///< Gradients in whose place another tensor lives.

  void take(std::size_t index, const at::Tensor& gradient);
  void store(std::size_t index, const at::Tensor& dense);
  std::byte* place_of(std::size_t index) const;
};

namespace {

// A slab beyond this is not read again before the reduction: storing past the cache leaves it to backward.
constexpr std::uint64_t non_temporal_bytes = std::uint64_t{1} << 20;

}  // namespace

void TakeOver::State::take(std::size_t index, const at::Tensor& gradient) {
  at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (!dense.is_contiguous()) dense = dense.contiguous();
  if (allocator != nullptr) {
    allocator->withdraw(index);
    const bool taken = allocator->in_use(index) && dense.const_data_ptr() != place_of(index);
    if (taken) {
      waiting.emplace_back(index, dense);
      return;
    }
  }
  store(index, dense);
}

void TakeOver::State::store(std::size_t index, const at::Tensor& dense) {
  const auto& header = session->header();
  const session::ElementTypes types{header.element, header.slab_element};
  const auto& kernels = session::best_kernels();
  const auto count = entries[index].count;
  auto* place = place_of(index);
  auto& tag = session->tags(rank)[index];
  bool finite = false;
  if (dense.const_data_ptr() == place) {
    finite = kernels.all_finite(place, count, types.master);
  } else if (tag.load(std::memory_order_relaxed) != attempt) {
    finite = kernels.take_over_copy(place, dense.const_data_ptr(), count, types, non_temporal_bytes);
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
  if (session.header().slab_element == session::SlabElement::same) {
    std::vector<SlabAllocator::Place> places;
    for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
      places.push_back(
          {state_->place_of(i), manifest.tensors[i].count * session::bytes_of(session.header().element)});
    state_->allocator = &SlabAllocator::install(places);
  }

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
  state_->nonfinite.clear();
  state_->waiting.clear();
  if (state_->allocator != nullptr) state_->allocator->offer_all();
}

void TakeOver::backward(const at::Tensor& loss) {
  {
    const SlabAllocator::Scope scope(state_->allocator);
    loss.backward();
  }
  for (const auto& [index, gradient] : state_->waiting) state_->store(index, gradient);
  state_->waiting.clear();
}

std::vector<std::string> TakeOver::nonfinite() const {
  std::vector<std::string> names;
  for (const auto index : state_->nonfinite) names.push_back(state_->entries[index].name);
  return names;
}

}  // namespace accelmgr::tensor
