#include "accelmgr/optimizer.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "accelmgr/errors.hpp"
#include "engine/client/openmp.hpp"
#include "libtorch/handle/optimizer_state.hpp"

namespace accelmgr {
namespace {

// Up to this size an update runs on one thread. A second thread would have to be made, and does not help
// (measured: 1 million parameters take 0.2 ms either way; with two threads 3 ms when another process uses the
// second core).
constexpr std::int64_t one_thread_elements = std::int64_t{2} << 20;
constexpr double clip_epsilon = 1e-6;  // As in torch's clip_grad_norm_.

/// A group that is trained, and the optimizer's state for it.
struct TrainedGroup {
  std::string name;  ///< Its name in state().
  at::Tensor parameters;
  at::Tensor gradients;
  double weight_decay = 0;
  at::Tensor momentum_buffer;  ///< sgd with momentum
  at::Tensor exp_avg;          ///< adam, adamw
  at::Tensor exp_avg_sq;       ///< adam, adamw
};

/// The fused operators do not check shapes; they would write past the end of a short tensor.
void check_group(const FlatGroup& group, std::size_t index) {
  const auto refuse = [&](const std::string& problem) {
    throw UsageError("Optimizer: group " + std::to_string(index) + ": " + problem);
  };
  if (!group.parameters.defined() || !group.gradients.defined()) refuse("a tensor is undefined");
  for (const auto& tensor : {group.parameters, group.gradients}) {
    if (!tensor.is_cpu() || tensor.dim() != 1 || !tensor.is_contiguous()) {
      refuse("parameters and gradients must be contiguous 1-d tensors on the CPU");
    }
    if (!at::isFloatingType(tensor.scalar_type())) {
      refuse(std::string("the dtype is ") + c10::toString(tensor.scalar_type()) +
             "; it must be float64, float32, float16 or bfloat16");
    }
  }
  const auto dtype = group.gradients.scalar_type();
  const bool is_wider = dtype == at::kFloat && at::isReducedFloatingType(group.parameters.scalar_type());
  if ((group.parameters.scalar_type() != dtype && !is_wider) ||
      group.parameters.numel() != group.gradients.numel()) {
    refuse("parameters and gradients differ in dtype or length (" + std::to_string(group.parameters.numel()) +
           " and " + std::to_string(group.gradients.numel()) + ")");
  }
}

/// L2 norm of a flat tensor in one pass, by blocks. For one output torch would use one thread, and add
/// float32 squares until they no longer change the sum: the norm of 33 million numbers was 0.2% off.
double flat_norm(const at::Tensor& flat) {
  constexpr std::int64_t block = 4096;
  const std::int64_t blocked = flat.numel() / block * block;
  double squares = 0;
  if (blocked > 0) {
    const auto dtype = at::isReducedFloatingType(flat.scalar_type()) ? at::kFloat : flat.scalar_type();
    const auto norms =
        at::linalg_vector_norm(flat.narrow(0, 0, blocked).view({-1, block}), 2, {1}, false, dtype);
    const double norm = at::linalg_vector_norm(norms, 2, {}, false, at::kDouble).item<double>();
    squares += norm * norm;
  }
  if (blocked < flat.numel()) {
    const auto rest = flat.narrow(0, blocked, flat.numel() - blocked);
    const double norm = at::linalg_vector_norm(rest, 2, {}, false, at::kDouble).item<double>();
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

}  // namespace

struct Optimizer::State {
  OptimizerConfig config;
  std::vector<TrainedGroup> groups;
  std::int64_t total_updates = 0;
  at::Tensor updates = at::zeros({}, at::kLong);  ///< A tensor, so that state() can return a view of it.

  void add(const FlatGroup& group, const std::string& name);
  std::int64_t& update_count() noexcept { return *updates.mutable_data_ptr<std::int64_t>(); }
  std::int64_t elements() const;
  double gradient_norm() const;
  void update(TrainedGroup& group, double learning_rate, double divisor);
};

void Optimizer::State::add(const FlatGroup& group, const std::string& name) {
  TrainedGroup trained;
  trained.name = name;
  trained.parameters = group.parameters;
  trained.gradients = group.gradients;
  trained.weight_decay = group.kind == FlatGroup::Kind::decay ? config.weight_decay : 0.0;
  if (config.kind == OptimizerKind::sgd) {
    if (config.momentum > 0) trained.momentum_buffer = at::zeros_like(group.parameters);
  } else {
    trained.exp_avg = at::zeros_like(group.parameters);
    trained.exp_avg_sq = at::zeros_like(group.parameters);
  }
  groups.push_back(std::move(trained));
}

/// Number of elements of all trained groups.
std::int64_t Optimizer::State::elements() const {
  std::int64_t sum = 0;
  for (const auto& group : groups) sum += group.parameters.numel();
  return sum;
}

/// L2 norm of the gradients of all trained groups, before division.
double Optimizer::State::gradient_norm() const {
  double squares = 0;
  for (const auto& group : groups) {
    const double norm = flat_norm(group.gradients);
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

/// Makes one update from `gradients / divisor`. The fused operators divide while they read, but only by a
/// float32. float64 gradients would lose half of their digits if the divisor is not exact in float32; then
/// they are divided in a separate pass.
void Optimizer::State::update(TrainedGroup& group, double learning_rate, double divisor) {
  std::optional<at::Tensor> grad_scale;
  if (divisor != 1.0) {
    const auto narrowed = static_cast<float>(divisor);
    if (group.gradients.scalar_type() != at::kDouble || static_cast<double>(narrowed) == divisor) {
      grad_scale = at::full({}, narrowed, at::kFloat);
    } else {
      group.gradients.div_(divisor);
    }
  }

  // The operators take tensors of one dtype. With `gradients.dtype: float32` the parameters' dtype is
  // smaller.
  const auto gradients = group.gradients.to(group.parameters.scalar_type());
  if (config.kind == OptimizerKind::sgd) {
    const bool has_momentum = group.momentum_buffer.defined();
    at::_fused_sgd_(group.parameters, gradients,
                    has_momentum ? at::TensorList(group.momentum_buffer) : at::TensorList(),
                    group.weight_decay, config.momentum, learning_rate, /*dampening=*/0.0, config.nesterov,
                    /*maximize=*/false, /*is_first_step=*/update_count() == 0, grad_scale);
    return;
  }
  const auto step = at::full({}, static_cast<double>(update_count() + 1), at::kDouble);
  // Both operators take the same arguments; they apply weight decay differently.
  const auto update_moments =
      config.kind == OptimizerKind::adamw ? at::_ops::_fused_adamw_::call : at::_ops::_fused_adam_::call;
  update_moments(group.parameters, gradients, group.exp_avg, group.exp_avg_sq, /*max_exp_avg_sqs=*/{}, step,
                 learning_rate, config.beta1, config.beta2, group.weight_decay, config.epsilon,
                 /*amsgrad=*/false, /*maximize=*/false, grad_scale, /*found_inf=*/{});
}

Optimizer::Optimizer(const OptimizerConfig& config, std::vector<FlatGroup> groups, std::int64_t total_updates)
    : state_(std::make_unique<State>()) {
  libtorch::check_config(config);
  const auto names = libtorch::names_in_state(groups);
  state_->config = config;
  state_->total_updates = total_updates;
  for (std::size_t index = 0; index < groups.size(); ++index) {
    if (groups[index].kind == FlatGroup::Kind::frozen) continue;
    check_group(groups[index], index);
    state_->add(groups[index], names[index]);
  }
}

Optimizer::~Optimizer() = default;

double Optimizer::step() {
  const at::NoGradGuard no_grad;
  const client::OneThread one_thread(state_->elements() <= one_thread_elements);
  double divisor = state_->config.steps_per_update;
  double norm = std::numeric_limits<double>::quiet_NaN();
  if (state_->config.clip_norm > 0) {
    norm = state_->gradient_norm() / divisor;
    const double excess = (norm + clip_epsilon) / state_->config.clip_norm;
    // Not `excess > 1`: NaN must reach the parameters, as it does in torch.
    if (!(excess <= 1.0)) divisor *= excess;
  }
  const double rate = learning_rate();
  for (auto& group : state_->groups) state_->update(group, rate, divisor);
  ++state_->update_count();
  return norm;
}

std::int64_t Optimizer::updates() const noexcept { return state_->update_count(); }

double Optimizer::learning_rate() const noexcept {
  return scheduled_learning_rate(state_->config, state_->update_count(), state_->total_updates);
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> all;
  for (const auto& group : state_->groups) {
    const auto add = [&](const char* what, const at::Tensor& tensor) {
      if (tensor.defined()) all.push_back({fmt::format("optimizer/{}/{}", group.name, what), tensor});
    };
    add("momentum_buffer", group.momentum_buffer);
    add("exp_avg", group.exp_avg);
    add("exp_avg_sq", group.exp_avg_sq);
  }
  all.push_back({"optimizer/updates", state_->updates});
  return all;
}

void Optimizer::load_state(const std::vector<NamedTensor>& given) { libtorch::load_state(state(), given); }

}  // namespace accelmgr
