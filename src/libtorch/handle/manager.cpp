#include "accelmgr/manager.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <map>
#include <thread>
#include <utility>

#include "base/interruption.hpp"
#include "base/timing.hpp"
#include "engine/client/handle.hpp"
#include "engine/client/pending_steps.hpp"
#include "engine/replica/model.hpp"
#include "libtorch/handle/optimizer_state.hpp"
#include "libtorch/handle/replica.hpp"
#include "libtorch/tensor/convert.hpp"
#include "libtorch/tensor/torch_version.hpp"

namespace accelmgr {
namespace {

// The manager and the runners never return from init(); they need the factory of replicas before it.
[[maybe_unused]] const bool registered = libtorch::register_replica();

/// Memory of the session as a tensor. The session stays mapped as long as any view of the tensor exists.
at::Tensor owning_view(const std::shared_ptr<const session::Session>& session, std::byte* data, DType dtype,
                       at::IntArrayRef shape, at::IntArrayRef strides) {
  return at::from_blob(
      data, shape, strides, [session](void*) {}, at::TensorOptions().dtype(tensor::scalar_type(dtype)));
}

/// Zeros without memory, for a frozen parameter.
at::Tensor no_gradient(const session::TensorEntry& entry) {
  return at::zeros({}, at::TensorOptions().dtype(tensor::scalar_type(entry.dtype))).expand(entry.shape);
}

/// Tensors over the session, in the order of the manifest.
struct Views {
  Views(const std::shared_ptr<const session::Session>& session, const session::HostView& host,
        const session::Manifest& manifest);

  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> gradients;
  std::vector<FlatGroup> groups;
};

Views::Views(const std::shared_ptr<const session::Session>& session, const session::HostView& host,
             const session::Manifest& manifest) {
  const at::NoGradGuard no_grad;
  const auto places = replica::places_of(host.parameters(), manifest);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& entry = manifest.tensors[i];
    const auto& [data, strides] = places[i];
    auto parameter = owning_view(session, data, entry.dtype, entry.shape, strides);
    const bool frozen = entry.group == session::Group::frozen;
    auto gradient = frozen ? no_gradient(entry)
                           : owning_view(session, host.gradients() + entry.gradient, entry.gradient_dtype(),
                                         entry.shape, entry.gradient_strides());
    if (!frozen) {
      parameter.set_requires_grad(true);
      if (gradient.scalar_type() == parameter.scalar_type()) parameter.mutable_grad() = gradient;
    }
    parameters.push_back({entry.name, parameter});
    gradients.push_back({entry.name, gradient});
  }
  for (const auto group : {session::Group::decay, session::Group::no_decay, session::Group::frozen}) {
    std::map<DType, std::vector<const session::TensorEntry*>> of_dtype;  // Those of a dtype lie together.
    for (const auto& entry : manifest.tensors)
      if (entry.group == group) of_dtype[entry.dtype].push_back(&entry);
    for (const auto& [dtype, entries] : of_dtype) {
      const auto& first = *std::ranges::min_element(entries, {}, &session::TensorEntry::offset);
      const auto& last = *std::ranges::max_element(entries, {}, &session::TensorEntry::offset);
      const auto end = session::align_up(last->offset + last->bytes(), session::region_alignment);
      const std::vector<std::int64_t> shape{
          static_cast<std::int64_t>((end - first->offset) / size_of(dtype))};
      const std::vector<std::int64_t> strides{1};
      groups.push_back(
          {static_cast<FlatGroup::Kind>(group),
           owning_view(session, host.parameters() + first->offset, dtype, shape, strides),
           group == session::Group::frozen
               ? at::zeros({}, at::TensorOptions().dtype(tensor::scalar_type(dtype))).expand(shape)
               : owning_view(session, host.gradients() + first->gradient, first->gradient_dtype(), shape,
                             strides)});
    }
  }
}

/// Throws ModelError unless `value` is a tensor whose elements can be copied.
void check_copied(const char* call, const std::string& name, const at::Tensor& value) {
  if (!value.defined())
    throw ModelError(fmt::format("{}: the tensor for '{}' is undefined; nothing was changed", call, name));
  if (!value.is_cpu() || value.layout() != at::kStrided)
    throw ModelError(
        fmt::format("{}: the tensor for '{}' is a {}; it must be dense and on the CPU; nothing was changed",
                    call, name, value.toString()));
}

std::string type_text(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", name_of(tensor::dtype_of(tensor.scalar_type())),
                     fmt::join(tensor.sizes(), ", "));
}

/// The elements of `value` that `of` has in memory; `of` may be expanded.
at::Tensor stored(at::Tensor value, const at::Tensor& of) {
  for (std::int64_t d = 0; d < of.dim(); ++d)
    if (of.stride(d) == 0 && of.size(d) > 1) value = value.narrow(d, 0, 1);
  return value;
}

/// Throws ModelError unless copying `value` over `current`, a parameter, cannot fail.
void check_replacement(const NamedTensor& current, const at::Tensor& value) {
  constexpr const char* call = "update_model_parameters";
  check_copied(call, current.name, value);
  if (value.sizes() != current.tensor.sizes() || value.scalar_type() != current.tensor.scalar_type())
    throw ModelError(fmt::format("{}: '{}' is {}, but the tensor passed for it is {}; nothing was changed",
                                 call, current.name, type_text(current.tensor), type_text(value)));
  if (const auto part = stored(value, current.tensor);
      part.sizes() != value.sizes() && !at::equal(part.expand_as(value), value))
    throw ModelError(
        fmt::format("{}: '{}' is expanded (many of its elements are one in memory), but they differ in the "
                    "tensor passed for it; nothing was changed",
                    call, current.name));
}

/// Group 0 decays, group 1 does not.
session::Update update_of(const OptimizerConfig& config, std::int64_t total_updates) {
  using Kind = session::Update::Kind;
  const bool is_sgd = config.kind == OptimizerKind::sgd;
  session::Update update{.kind = is_sgd                               ? Kind::sgd
                                 : config.kind == OptimizerKind::adam ? Kind::adam
                                                                      : Kind::adamw,
                         .clip_norm = config.clip_norm,
                         .divisor = double(config.steps_per_update),
                         .schedule = libtorch::schedule_of(config, total_updates)};
  auto& decay = update.groups[0];
  auto& no_decay = update.groups[1];
  decay = {.learning_rate = config.learning_rate,
           .weight_decay = config.weight_decay,
           .momentum = is_sgd ? config.momentum : 0,
           .beta1 = config.beta1,
           .beta2 = config.beta2,
           .epsilon = config.epsilon,
           .nesterov = config.nesterov};
  no_decay = decay;
  no_decay.weight_decay = 0;
  return update;
}

/// Refers to the memory of `dense`, which must be row-major without gaps and outlive the result.
client::Value value_of(const std::string& name, const at::Tensor& dense) {
  return {name, tensor::dtype_of(dense.scalar_type()), dense.sizes().vec(),
          static_cast<const std::byte*>(dense.const_data_ptr())};
}

client::Extras extras_of(const CheckpointExtras& extras) {
  client::Extras out{.metric = extras.metric, .json = extras.json, .directory = extras.directory};
  for (const auto& [name, tensor] : extras.tensors) {
    if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous() ||
        tensor.is_neg())
      throw CheckpointError(fmt::format("'{}' is a {}; a checkpoint holds contiguous tensors on the CPU",
                                        name, tensor.toString()));
    try {
      out.tensors.push_back(value_of(name, tensor));
    } catch (const ModelError& error) {
      throw CheckpointError(fmt::format("'{}': {}", name, error.what()));
    }
  }
  return out;
}

std::optional<Resumed> resumed_of(const std::optional<client::ResumedFrom>& from) {
  if (!from) return std::nullopt;
  Resumed out{.path = from->path,
              .step = from->step,
              .json = from->json,
              .refused = from->refused,
              .run_id = from->run_id,
              .configuration = from->configuration,
              .extras_step = from->extras_step};
  for (const auto& value : from->tensors)
    out.tensors.push_back({value.name, at::from_blob(
                                           value.data.get(), value.shape, [data = value.data](void*) {},
                                           at::TensorOptions().dtype(tensor::scalar_type(value.dtype)))});
  return out;
}

}  // namespace

struct Manager::State {
  State(const Config& config, const StartOptions& options);
  State(const std::string& path, const AttachOptions& options);

  /// Throws UsageError when requires_grad of a parameter is no longer what it was at the start. Reports
  /// writes to frozen parameters.
  void check_frozen();
  /// All trained parameters have had so many updates.
  void set_updates(std::int64_t updates) noexcept;

  std::optional<Views> views;
  client::Handle handle;
  ~State();
  StepResult step(const StepOptions& options);
  session::Update prepared_update(const StepOptions& options);
  std::int64_t updates() const noexcept;
  PendingSteps keep_pending(PendingSteps::Core::Source source);
  PendingSteps follow_service();
  PendingSteps step_on_thread(int n, const StepOptions& given);

  std::optional<Resumed> resumed;
  std::shared_ptr<PendingSteps::Core> pending;
  std::uint64_t frozen_writes = 0;  ///< Writes of torch's operations to frozen parameters.
};

Manager::State::State(const Config& config, const StartOptions& options)
    : handle(config, {.method = options.method,
                      .command = options.command,
                      .prepared =
                          [&](const auto& session, const auto& host, const auto& manifest, bool) {
                            views.emplace(session, host, manifest);
                            if (options.prepared) options.prepared(views->parameters, views->gradients);
                          },
                      .lock_checkpoints = options.lock_checkpoints}) {}

Manager::State::State(const std::string& path, const AttachOptions& options)
    : handle(
          path,
          {.name = options.name, .timeout_s = options.timeout_s, .keep_gradients = options.keep_gradients}) {
  views.emplace(handle.session(), handle.view(), handle.manifest());
}

// The group of a parameter in the master decides whether it is trained, and is fixed at the start.
void Manager::State::check_frozen() {
  std::uint64_t writes = 0;
  for (std::size_t i = 0; i < views->parameters.size(); ++i) {
    const bool frozen = handle.manifest().tensors[i].group == session::Group::frozen;
    if (views->parameters[i].tensor.requires_grad() == frozen)
      throw UsageError(fmt::format(
          "requires_grad of parameter '{}' was changed after the start, but runners do not see that; stop "
          "this manager, and start one with the changed model",
          views->parameters[i].name));
    if (frozen) writes += views->parameters[i].tensor._version();
  }
  for (const auto& group : views->groups)
    if (group.kind == FlatGroup::Kind::frozen) writes += group.parameters._version();
  if (std::exchange(frozen_writes, writes) != writes) handle.frozen_written();
}

void Manager::State::set_updates(std::int64_t updates) noexcept {
  const auto& tensors = handle.manifest().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool frozen = tensors[i].group == session::Group::frozen;
    handle.set_update(i, frozen ? session::no_update_group : static_cast<std::uint64_t>(tensors[i].group),
                      static_cast<std::uint64_t>(updates));
  }
}

Manager::Manager(std::unique_ptr<State> state) : state_(std::move(state)) {}
Manager::Manager(Manager&&) noexcept = default;
Manager& Manager::operator=(Manager&&) noexcept = default;
Manager::~Manager() = default;

Manager Manager::start(const Config& config, const StartOptions& options) {
  tensor::check_torch_version();
  const base::InterruptionScope scope(options.interrupted);
  return Manager(std::make_unique<State>(config, options));
}

Manager Manager::attach(const std::string& service, const AttachOptions& options) {
  tensor::check_torch_version();
  const base::InterruptionScope scope(options.interrupted);
  return Manager(std::make_unique<State>(service, options));
}

LeftGradients Manager::left_gradients() const noexcept { return state_->handle.left_gradients(); }
const std::string& Manager::unfinished() const { return state_->handle.unfinished(); }

Manager::State::~State() {
  if (pending) pending->leave();
}

StepResult Manager::State::step(const StepOptions& options) {
  handle.check_owner("step");
  check_frozen();
  if (options.optimizer == nullptr) return handle.step(options);
  return handle.step(options, prepared_update(options));
}

session::Update Manager::State::prepared_update(const StepOptions& options) {
  libtorch::check_config(*options.optimizer);
  handle.check_drives("step");  // The service may be counting updates.
  set_updates(updates());
  return update_of(*options.optimizer, options.total_updates);
}

std::int64_t Manager::State::updates() const noexcept {
  const auto& tensors = handle.manifest().tensors;
  const auto trained = [](const auto& tensor) { return tensor.group != session::Group::frozen; };
  const auto first = std::ranges::find_if(tensors, trained);
  if (first == tensors.end()) return 0;
  return static_cast<std::int64_t>(handle.updates(static_cast<std::size_t>(first - tensors.begin())));
}

PendingSteps Manager::State::keep_pending(PendingSteps::Core::Source source) {
  pending = std::make_shared<PendingSteps::Core>(std::move(source));
  return PendingSteps(pending);
}

PendingSteps Manager::State::follow_service() {
  const auto next = [this](std::vector<StepResult>& made, std::size_t known) {
    auto steps = handle.service_steps(known);
    if (steps.is_all && !steps.error.empty()) throw SessionError(steps.error);
    made = std::move(steps.results);
    if (steps.under_way && made.empty())
      std::this_thread::sleep_for(std::chrono::nanoseconds(timing::look_ns));
    return steps.under_way || !steps.is_all;
  };
  return keep_pending({.next = next, .cancel = [this] { handle.cancel_service_steps(); }});
}

PendingSteps Manager::State::step_on_thread(int n, const StepOptions& given) {
  handle.claim("begin_steps");
  std::shared_ptr<void> claim(nullptr, [this](void*) { handle.release(); });
  const auto config = std::make_shared<const OptimizerConfig>(*given.optimizer);
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  const auto begun = std::make_shared<std::promise<void>>();
  auto options = given;
  options.optimizer = config.get();
  auto next = [=, this, held = std::move(claim)](std::vector<StepResult>& made, std::size_t known) {
    if (known == 0) {
      handle.take_claim();
      begun->set_value();
    }
    if (*cancelled) return false;
    made.push_back(step(options));
    return made.back() && known + 1 < static_cast<std::size_t>(n);
  };
  auto steps = keep_pending({.next = std::move(next), .cancel = [cancelled] { *cancelled = true; }});
  begun->get_future().wait();
  return steps;
}

PendingSteps Manager::begin_steps(int n, const StepOptions& options) {
  auto& state = *state_;
  state.handle.check_owner("begin_steps");
  if (n < 1) throw UsageError(fmt::format("begin_steps(): n is {}; it must be at least 1", n));
  if (options.optimizer == nullptr || options.repeat)
    throw UsageError("begin_steps(): the steps are inner ones; set StepOptions::optimizer, and not `repeat`");
  if (state.pending && !PendingSteps(state.pending).done())
    throw UsageError("begin_steps() was called while steps that it has begun before are under way");
  state.check_frozen();
  if (!state.handle.is_attached()) return state.step_on_thread(n, options);
  state.handle.begin_service_steps(n, options, state.prepared_update(options));
  return state.follow_service();
}

std::optional<PendingSteps> Manager::pending_steps() {
  if (state_->pending) return PendingSteps(state_->pending);
  if (state_->handle.found_steps() == 0) return std::nullopt;
  return state_->follow_service();
}

StepResult Manager::step(const StepOptions& options) { return state_->step(options); }
std::int64_t Manager::updates() const noexcept { return state_->updates(); }

std::vector<NamedTensor> Manager::optimizer_state() const {
  state_->handle.check_owner("optimizer_state");
  return optimizer_state(static_cast<int>(state_->handle.view().control().moments_used.load()));
}

std::vector<NamedTensor> Manager::optimizer_state(int moments) const {
  const auto& handle = state_->handle;
  std::vector<NamedTensor> state;
  const auto names = libtorch::names_in_state(groups());
  const auto held = static_cast<session::Moments>(moments);
  const bool both = held == session::Moments::both;
  for (std::size_t i = 0; i < names.size() && held != session::Moments::none; ++i) {
    const auto& group = groups()[i];
    if (group.kind == FlatGroup::Kind::frozen) continue;
    const auto offset = static_cast<std::byte*>(group.parameters.data_ptr()) - handle.view().parameters();
    const auto add = [&](const char* what, std::uint64_t moment) {
      auto* data = handle.view().moments() + moment * handle.session()->header().bytes.trained + offset;
      state.push_back({fmt::format("optimizer/{}/{}", names[i], what),
                       owning_view(handle.session(), data, tensor::dtype_of(group.parameters.scalar_type()),
                                   group.parameters.sizes(), group.parameters.strides())});
    };
    add(both ? "exp_avg" : "momentum_buffer", 0);
    if (both) add("exp_avg_sq", 1);
  }
  state.push_back({"optimizer/updates", at::scalar_tensor(updates(), at::kLong)});
  return state;
}

void Manager::load_optimizer_state(const OptimizerConfig& config, const std::vector<NamedTensor>& state) {
  auto& handle = state_->handle;
  const auto moments = update_of(config, 0).moments();
  handle.clear_moments(moments);
  const auto own = optimizer_state(static_cast<int>(moments));
  libtorch::load_state(own, state);
  state_->set_updates(own.back().tensor.item<std::int64_t>());
  handle.use_moments(moments);
}

void Manager::zero_grad() { state_->handle.zero_grad(); }

const std::vector<NamedTensor>& Manager::parameters() const {
  state_->handle.check_owner("parameters");
  return state_->views->parameters;
}

const std::vector<NamedTensor>& Manager::gradients() const {
  state_->handle.check_owner("gradients");
  return state_->views->gradients;
}

std::vector<bool> Manager::touched() const { return state_->handle.touched(); }

const std::vector<FlatGroup>& Manager::groups() const {
  state_->handle.check_owner("groups");
  const auto& tensors = state_->handle.manifest().tensors;
  for (const auto& entry : tensors)
    if (entry.shares >= 0)
      throw ModelError(
          fmt::format("parameter '{}' shares the memory of '{}' without being the same parameter: flat "
                      "groups would update "
                      "a copy of it. Register one parameter under both names, or step on parameters()",
                      entry.name, tensors[static_cast<std::size_t>(entry.shares)].name));
  return state_->views->groups;
}

std::vector<NamedTensor> Manager::buffers() const {
  std::vector<NamedTensor> out;
  for (const auto& value : state_->handle.buffers())
    out.push_back(
        {value.name, tensor::view(const_cast<std::byte*>(value.data), value.dtype, value.shape).clone()});
  return out;
}

std::vector<NamedTensor> Manager::state_dict() const {
  std::vector<NamedTensor> out;
  const auto& manifest = state_->handle.manifest();
  for (const auto& [name, copy] : buffers()) {
    const auto entry = std::ranges::find(manifest.buffers, name, &session::BufferEntry::name);
    if (!entry->persistent) continue;
    out.push_back({name, copy});
    for (const auto& alias : entry->aliases) out.push_back({alias, copy});
  }
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    if (!manifest.tensors[i].persistent) continue;
    const auto& [name, tensor] = state_->views->parameters[i];
    const auto copy = tensor.detach().clone();
    out.push_back({name, copy});
    for (const auto& alias : manifest.tensors[i].aliases) out.push_back({alias, copy});
  }
  return out;
}

void Manager::revert_parameters() { state_->handle.revert_parameters(); }

Manager::Writing::Writing(Manager& manager) : manager_(manager), exceptions_(std::uncaught_exceptions()) {
  manager.state_->handle.begin_writing(client::Written::trained);  // See check_frozen().
}
Manager::Writing::~Writing() {
  manager_.state_->handle.end_writing(/*whole=*/std::uncaught_exceptions() == exceptions_);
}

void Manager::update_model_parameters(std::span<const at::Tensor> values) {
  state_->handle.check_owner("update_model_parameters");
  const auto& parameters = state_->views->parameters;
  if (values.size() != parameters.size())
    throw ModelError(fmt::format("update_model_parameters: {} tensors for {} parameters; nothing was changed",
                                 values.size(), parameters.size()));
  for (std::size_t i = 0; i < values.size(); ++i) check_replacement(parameters[i], values[i]);
  const at::NoGradGuard no_grad;
  const auto bracket = writing();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& current = parameters[i].tensor;
    stored(current, current).copy_(stored(values[i], current));
  }
}

void Manager::update_buffers(const std::vector<NamedTensor>& values) {
  state_->handle.check_owner("update_buffers");
  std::vector<at::Tensor> dense;
  std::vector<client::Value> memory;
  for (const auto& [name, value] : values) {
    check_copied("update_buffers", name, value);
    dense.push_back(value.resolve_conj().resolve_neg().contiguous());
    memory.push_back(value_of(name, dense.back()));
  }
  state_->handle.update_buffers(memory);
}

Statistics Manager::statistics() const { return state_->handle.statistics(); }
void Manager::resize(int runners) { state_->handle.resize(runners); }
void Manager::recover() { state_->handle.recover(); }

double Manager::save_checkpoint(const CheckpointExtras& extras) {
  return state_->handle.save_checkpoint(extras_of(extras));
}

std::vector<CheckpointWritten> Manager::checkpoints_written(double wait_s) {
  return state_->handle.checkpoints_written(wait_s);
}

const std::optional<Resumed>& Manager::resumed() const {
  if (!state_->resumed) state_->resumed = resumed_of(state_->handle.resumed());
  return state_->resumed;
}
bool Manager::checkpoint_requested() const { return state_->handle.checkpoint_requested(); }

const std::string& Manager::run_id() const { return state_->handle.run_id(); }
const Config& Manager::config() const { return state_->handle.config(); }
void Manager::stop() {
  if (state_->pending) state_->pending->leave();
  state_->handle.stop();
}

void Manager::kill() noexcept {
  if (state_) state_->handle.kill();
}

}  // namespace accelmgr
