#include "accelmgr/manager.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/clock.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "config/loader.hpp"
#include "config/start_method.hpp"
#include "host/checkpoints.hpp"
#include "host/processes.hpp"
#include "host/stepper.hpp"
#include "manager/role.hpp"
#include "session/kernels.hpp"
#include "session/session.hpp"
#include "tensor/master.hpp"
#include "tensor/torch_version.hpp"

namespace accelmgr {
namespace {

/// All of a region as one tensor, which keeps the session mapped as long as any view of it lives.
at::Tensor owning_view(const std::shared_ptr<session::Session>& session, std::byte* region) {
  const auto& header = session->header();
  const auto dtype = header.element == session::Element::f32 ? at::kFloat : at::kDouble;
  return at::from_blob(
      region, {static_cast<std::int64_t>(header.elements)}, [session](void*) {},
      at::TensorOptions().dtype(dtype));
}

at::Tensor view_of(const at::Tensor& flat, const session::TensorEntry& entry) {
  return flat.narrow(0, static_cast<std::int64_t>(entry.first), static_cast<std::int64_t>(entry.count))
      .view(entry.shape)
      .detach();
}

/// The values of a parameter: its own, or those that it shares.
at::Tensor values_of(const at::Tensor& flat, const session::Manifest& manifest,
                     const session::TensorEntry& entry) {
  if (entry.shares < 0) return view_of(flat, entry);
  const auto first = manifest.tensors[static_cast<std::size_t>(entry.shares)].first + entry.shared_offset;
  return flat.as_strided(entry.shape, entry.strides, static_cast<std::int64_t>(first)).detach();
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

/// Throws ModelError unless copying `value` over what has this name, shape and dtype cannot fail.
void check_replacement(const char* call, const std::string& name, at::IntArrayRef shape, at::ScalarType dtype,
                       const at::Tensor& value) {
  if (!value.defined())
    throw ModelError(fmt::format("{}: the tensor for '{}' is undefined; nothing was changed", call, name));
  if (value.sizes() != shape || value.scalar_type() != dtype)
    throw ModelError(fmt::format("{}: '{}' is {} {}, the tensor passed for it {} {}; nothing was changed",
                                 call, name, at::toString(dtype), shape_text(shape),
                                 at::toString(value.scalar_type()), shape_text(value.sizes())));
  if (!value.is_cpu() || value.layout() != at::kStrided)
    throw ModelError(
        fmt::format("{}: the tensor for '{}' is a {}; it must be dense and on the CPU; nothing was changed",
                    call, name, value.toString()));
}

/// The buffer of that name, also by another name of it; null when there is none.
const session::BufferEntry* find_buffer(const session::Manifest& manifest, const std::string& name) {
  for (const auto& entry : manifest.buffers)
    if (entry.name == name ||
        std::find(entry.aliases.begin(), entry.aliases.end(), name) != entry.aliases.end())
      return &entry;
  return nullptr;
}

/// A process that was killed ends a moment later: recover() waits so long for that.
constexpr double killed_manager_ends_s = 2.0;

std::uint64_t peak_memory(pid_t pid) {
  const auto usage = ipc::usage(pid);
  return usage && pid != 0 ? usage->peak_rss_bytes : 0;
}

}  // namespace

struct Manager::State {
  State(const Config& c, bool lock_checkpoints) : config(c), run(config.checkpoint, lock_checkpoints) {}

  /// Bars a second thread, a forked child and a closed handle.
  class Use {
   public:
    Use(State& state, const char* call) : state_(state) {
      state.check_owner(call);
      if (state.busy.exchange(true))
        throw UsageError(
            fmt::format("{}() while another thread is inside this manager; one thread at a time", call));
    }
    ~Use() { state_.busy.store(false); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    State& state_;
  };

  void check_owner(const char* call) const {
    if (getpid() != owner)
      throw UsageError(fmt::format("{}() in a forked child; the manager belongs to process {}", call, owner));
  }
  void check_open(const char* call) const {
    if (stopped) throw UsageError(fmt::format("{}() after stop()", call));
  }
  void check_frozen() const;
  void take(std::vector<base::UniqueFd> session_fds);
  void make_views();
  void begin_writing();
  void end_writing();
  void stop();

  Config config;
  host::Run run;  ///< Its lock outlives the processes of this manager.
  StartMethod method = StartMethod::spawn;
  pid_t owner = getpid();
  std::atomic<bool> busy{false};
  bool stopped = false;
  std::optional<host::Processes> processes;
  std::shared_ptr<session::Session> session;
  session::Manifest manifest;
  std::optional<host::Stepper> stepper;
  std::optional<host::Checkpoints> checkpoints;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> gradients;
  std::vector<FlatGroup> groups;
};

// What an optimizer does with a parameter is decided at the start, by where it lies.
void Manager::State::check_frozen() const {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool frozen = manifest.tensors[i].group == session::Group::frozen;
    if (parameters[i].tensor.requires_grad() == frozen)
      throw UsageError(fmt::format(
          "requires_grad of parameter '{}' was changed after the start, which runners do not see; stop this "
          "manager and start one whose model is made so",
          parameters[i].name));
  }
}

void Manager::State::take(std::vector<base::UniqueFd> session_fds) {
  session = std::make_shared<session::Session>(session::Session::attach(std::move(session_fds)));
  for (auto* region : {session->parameters(), session->gradients()})
    ipc::populate(region, session->master_bytes(), 1);
  manifest = session::read_manifest(session->manifest());
  make_views();
}

void Manager::State::make_views() {
  const at::NoGradGuard no_grad;
  const auto flat_parameters = owning_view(session, session->parameters());
  const auto flat_gradients = owning_view(session, session->gradients());
  for (const auto& entry : manifest.tensors) {
    auto parameter = values_of(flat_parameters, manifest, entry);
    auto gradient = view_of(flat_gradients, entry);
    if (entry.group != session::Group::frozen) {
      parameter.set_requires_grad(true);
      parameter.mutable_grad() = gradient;
    }
    parameters.push_back({entry.name, parameter});
    gradients.push_back({entry.name, gradient});
  }
  const auto alignment = session::region_alignment / session::bytes_of(session->header().element);
  for (auto group : {session::Group::decay, session::Group::no_decay, session::Group::frozen}) {
    std::uint64_t first = ~std::uint64_t{0}, end = 0;
    for (const auto& entry : manifest.tensors) {
      if (entry.group != group) continue;
      first = std::min(first, entry.first);
      end = std::max(end, session::align_up(entry.first + entry.count, alignment));
    }
    if (end == 0) continue;
    const auto from = static_cast<std::int64_t>(first), length = static_cast<std::int64_t>(end - first);
    groups.push_back({static_cast<FlatGroup::Kind>(group), flat_parameters.narrow(0, from, length),
                      flat_gradients.narrow(0, from, length)});
  }
}

void Manager::State::begin_writing() {
  auto& version = session->control().parameter_version;
  if (version.load() % 2 != 0)
    throw UsageError("parameters are being written already; writing() does not nest");
  if (!session->word().closed) throw UsageError("parameters may only be written between steps");
  version.fetch_add(1);
}

void Manager::State::end_writing() { session->control().parameter_version.fetch_add(1); }

void Manager::State::stop() {
  if (stopped) return;
  stopped = true;
  if (getpid() != owner) return;  // A forked child ends nothing of its parent's.
  base::log().info("the manager (pid {}) is asked to stop", processes->manager_pid());
  processes->ask_to_stop();
  const auto how = processes->end();
  base::log().info("all processes have ended; the manager: {}", how);
  run.lock.reset();
}

Manager::Manager(std::unique_ptr<State> state) : state_(std::move(state)) {}
Manager::Manager(Manager&&) noexcept = default;

Manager& Manager::operator=(Manager&& other) noexcept {
  if (this != &other) {
    if (state_) state_->stop();
    state_ = std::move(other.state_);
  }
  return *this;
}

Manager::~Manager() {
  if (state_) state_->stop();
}

Manager Manager::start(const Config& config, const StartOptions& options) {
  if (!manager::initialized())
    throw UsageError(
        "Manager::start() without accelmgr::init(); call accelmgr::init(argc, argv) first in main()");
  tensor::check_torch_version();
  config::validate(config);
  const auto begin = base::now_ns();
  base::log().info("a manager is started ({}): model '{}', data source '{}', {} runners",
                   config::name_of(options.method), config.model.kind, config.data.kind, config.nprocs);
  auto state = std::make_unique<State>(config, options.lock_checkpoints);
  state->method = options.method;
  auto concrete = config;  // Which checkpoint is the latest is decided once.
  concrete.checkpoint.resume = state->run.resumed ? state->run.resumed->path : "";
  state->processes = host::Processes::start(concrete, options, [&](std::vector<base::UniqueFd> fds) {
    state->take(std::move(fds));
    if (options.prepared) options.prepared(state->parameters, state->gradients);
  });
  state->stepper.emplace(state->config, *state->session, state->manifest, *state->processes);
  state->checkpoints.emplace(state->config, state->run, *state->session, state->manifest, *state->processes);
  base::set_log_step(state->session->counters(state->session->word().index).steps + 1);
  base::log().info("the manager (pid {}) has {} runners ready, after {:.1f} ms",
                   state->processes->manager_pid(), config.nprocs, double(base::now_ns() - begin) / 1e6);
  return Manager(std::move(state));
}

StepResult Manager::step(const StepOptions& options) {
  const State::Use use(*state_, "step");
  state_->check_open("step");
  state_->check_frozen();
  const double timeout_s = options.timeout_s.value_or(state_->config.step_timeout);
  if (!(timeout_s >= 0))  // Nor is a NaN.
    throw UsageError(
        fmt::format("step(): timeout is {}; it must be a number of seconds, 0 or more", timeout_s));
  return state_->stepper->step(options, timeout_s);
}

void Manager::zero_grad() {
  const State::Use use(*state_, "zero_grad");
  // One thread past the cache (128 MiB: 1.5 ms) is faster than two of torch's zero_() (3.7 ms).
  session::best_kernels().zero(state_->session->gradients(), state_->session->master_bytes());
}

const std::vector<NamedTensor>& Manager::parameters() const {
  state_->check_owner("parameters");
  return state_->parameters;
}

const std::vector<NamedTensor>& Manager::gradients() const {
  state_->check_owner("gradients");
  return state_->gradients;
}

const std::vector<FlatGroup>& Manager::groups() const {
  state_->check_owner("groups");
  for (const auto& entry : state_->manifest.tensors)
    if (entry.shares >= 0)
      throw ModelError(
          fmt::format("parameter '{}' shares the memory of '{}' without being the same parameter: flat "
                      "groups would update "
                      "a copy of it. Register one parameter under both names, or step on parameters()",
                      entry.name, state_->manifest.tensors[static_cast<std::size_t>(entry.shares)].name));
  return state_->groups;
}

std::vector<NamedTensor> Manager::buffers() const {
  const State::Use use(*state_, "buffers");
  std::vector<NamedTensor> out;
  auto* copy = state_->session->result_buffers(state_->session->word().index);
  for (const auto& entry : state_->manifest.buffers)
    if (entry.name != session::modes_buffer)
      out.push_back({entry.name, tensor::buffer_view(copy, entry).clone()});
  return out;
}

std::vector<NamedTensor> Manager::state_dict() const {
  std::vector<NamedTensor> out;
  for (const auto& [name, copy] : buffers()) {
    const auto* entry = find_buffer(state_->manifest, name);
    if (!entry->persistent) continue;
    out.push_back({name, copy});
    for (const auto& alias : entry->aliases) out.push_back({alias, copy});
  }
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) {
    const auto copy = state_->parameters[i].tensor.detach().clone();
    out.push_back({state_->parameters[i].name, copy});
    for (const auto& alias : state_->manifest.tensors[i].aliases) out.push_back({alias, copy});
  }
  return out;
}

Manager::Writing::Writing(Manager& manager) : manager_(manager) {
  const State::Use use(*manager.state_, "writing");
  manager.state_->begin_writing();
}

Manager::Writing::~Writing() { manager_.state_->end_writing(); }

void Manager::update_model_parameters(std::span<const at::Tensor> values) {
  const State::Use use(*state_, "update_model_parameters");
  const auto& parameters = state_->parameters;
  if (values.size() != parameters.size())
    throw ModelError(fmt::format("update_model_parameters: {} tensors for {} parameters; nothing was changed",
                                 values.size(), parameters.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& [name, current] = parameters[i];
    check_replacement("update_model_parameters", name, current.sizes(), current.scalar_type(), values[i]);
  }
  const at::NoGradGuard no_grad;
  state_->begin_writing();
  for (std::size_t i = 0; i < values.size(); ++i) parameters[i].tensor.copy_(values[i]);
  state_->end_writing();
}

void Manager::update_buffers(const std::vector<NamedTensor>& values) {
  const State::Use use(*state_, "update_buffers");
  const auto& session = *state_->session;
  if (!session.word().closed) throw UsageError("buffers may only be written between steps");
  std::vector<const session::BufferEntry*> entries;
  for (const auto& [name, value] : values) {
    const auto* entry = find_buffer(state_->manifest, name);
    if (entry == nullptr)
      throw ModelError(
          fmt::format("update_buffers: the model has no buffer '{}'; nothing was changed", name));
    check_replacement("update_buffers", name, entry->shape, static_cast<at::ScalarType>(entry->dtype), value);
    entries.push_back(entry);
  }
  const at::NoGradGuard no_grad;
  const auto valid = session.word().index;
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor::buffer_view(session.result_buffers(valid), *entries[i]).copy_(values[i].tensor);
    for (int rank = 0; rank < session.ranks(); ++rank)
      tensor::buffer_view(session.buffers(valid, rank), *entries[i]).copy_(values[i].tensor);
  }
  session.control().buffer_version.fetch_add(1);  // Runners load them when they begin the next attempt.
}

Statistics Manager::statistics() const {
  state_->check_owner("statistics");
  const auto& session = *state_->session;
  const auto word = session.word();
  const auto team = session.control().team.load();
  const auto& counters = session.counters(word.index);
  Statistics out;
  out.steps = counters.steps;
  out.attempts = word.attempt;
  out.samples = counters.samples;
  out.elements = counters.elements;
  out.skips = counters.skips;
  out.replacements = session.control().replacements.load();
  out.losses = session.control().incidents.load();
  out.parameter_version = session.control().parameter_version.load();
  out.session_bytes = session::session_bytes(session.header(), __builtin_popcount(team));
  out.manager_pid = state_->processes->manager_pid();
  out.manager_peak_memory_bytes = peak_memory(out.manager_pid);
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& record = session.record(rank);
    const auto pid = record.pid.load();
    out.runners.push_back({rank, pid, record.generation.load(), to_string(record.phase.load()),
                           record.attempt.load(), counters.rank_samples[rank], peak_memory(pid),
                           double(record.start_ns.load()) / 1e6, double(record.model_ns.load()) / 1e6});
  }
  return out;
}

void Manager::resize(int runners) {
  const State::Use use(*state_, "resize");
  state_->check_open("resize");
  const int most = state_->session->ranks();
  if (runners < 1 || runners > most)
    throw UsageError(
        fmt::format("resize({}): the session has room for 1 to {} runners (runners.max_runners, or nprocs)",
                    runners, most));
  const double timeout_s = state_->config.start_timeout;
  const std::function<bool()> interrupted = base::interrupted;
  const host::Stepper::Patience patience{base::Deadline::in_seconds(timeout_s), timeout_s, interrupted};
  state_->processes->send(protocol::Resize{runners});
  if (const auto answer = state_->processes->take_resized(patience.deadline); !answer.refused.empty())
    throw SessionError(fmt::format("resize({}): {}; nothing has changed", runners, answer.refused));
  const auto outcome = state_->stepper->assemble(patience);
  if (outcome.status != StepStatus::ok)
    throw RunnerError(fmt::format("resize({}): {}", runners, outcome.error), outcome.rank, "init");
  base::log().info("the team has {} runners, and they are ready", runners);
}

void Manager::recover() {
  const State::Use use(*state_, "recover");
  state_->check_open("recover");
  state_->processes->wait_until_manager_ended(base::Deadline::in_seconds(killed_manager_ends_s));
  if (!state_->stepper->manager_is_lost())
    throw UsageError(
        fmt::format("recover() while there is a manager (pid {}); it is for when the manager process is gone",
                    state_->processes->manager_pid()));
  state_->checkpoints->manager_lost();
  *state_->processes = host::Processes::start_over(state_->config, state_->method, state_->session->fds());
  state_->stepper->manager_recovered();
  base::log().info("a new manager (pid {}) has taken the session over", state_->processes->manager_pid());
}

double Manager::save_checkpoint(const CheckpointExtras& extras) {
  const State::Use use(*state_, "save_checkpoint");
  state_->check_open("save_checkpoint");
  return state_->checkpoints->save(extras);
}

std::vector<CheckpointWritten> Manager::checkpoints_written(double wait_s) {
  const State::Use use(*state_, "checkpoints_written");
  return state_->checkpoints->written(base::Deadline::in_seconds(wait_s));
}

const std::optional<Resumed>& Manager::resumed() const { return state_->run.resumed; }

const std::string& Manager::run_id() const { return state_->run.id; }

const Config& Manager::config() const { return state_->config; }

void Manager::stop() {
  const State::Use use(*state_, "stop");
  state_->stop();
}

void Manager::kill() noexcept {
  if (state_ && getpid() == state_->owner) state_->processes->kill();
}

}  // namespace accelmgr
