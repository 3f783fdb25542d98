#include "engine/client/handle.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/config/device_name.hpp"
#include "base/config/loader.hpp"
#include "base/config/start_method.hpp"
#include "base/interruption.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/system_calls.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/checkpoint/session_state.hpp"
#include "engine/client/checkpoints.hpp"
#include "engine/client/left_gradients.hpp"
#include "engine/client/opening.hpp"
#include "engine/client/service_name.hpp"
#include "engine/client/statistics.hpp"
#include "engine/client/step_report.hpp"
#include "engine/client/stepper.hpp"
#include "engine/manager/role.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/kernels.hpp"
#include "engine/session/spans.hpp"

namespace accelmgr::client {
namespace {

using nlohmann::json;

/// Finds the buffer that `value` replaces, by any of its names. Throws ModelError unless `value` fits it.
const session::BufferEntry& replaced_by(const Value& value, const session::Manifest& manifest) {
  const auto found = std::ranges::find_if(manifest.buffers, [&](const auto& entry) {
    return entry.name == value.name || std::ranges::find(entry.aliases, value.name) != entry.aliases.end();
  });
  if (found == manifest.buffers.end())
    throw ModelError(
        fmt::format("update_buffers: the model has no buffer '{}'; nothing was changed", value.name));
  if (found->dtype != value.dtype || found->shape != value.shape)
    throw ModelError(fmt::format(
        "update_buffers: '{}' is {} [{}], but the tensor passed for it is {} [{}]; nothing was changed",
        value.name, name_of(found->dtype), fmt::join(found->shape, ", "), name_of(value.dtype),
        fmt::join(value.shape, ", ")));
  return *found;
}

}  // namespace

struct Handle::State {
  /// Of a host that starts its manager.
  State(const Config& of, const StartSettings& settings)
      : config(of),
        run(settings.continues.empty()
                ? Run(of.checkpoint, settings.lock_checkpoints)
                : Run(json::parse(settings.continues).at("run_id").get<std::string>())),
        origin{settings.method, settings.command} {}
  /// Of a host of the service with its socket at `path`.
  State(const protocol::Opening& opening, std::string path)
      : config(config::from_yaml(opening.configuration)),
        run(opening.run_id, opening.tenure),
        service(std::move(path)) {}
  ~State() { stop(); }

  /// Throws UsageError for a second thread, for a call inside another one, and in a forked child.
  class Use {
   public:
    Use(State& state, const char* call) : state_(state) {
      state.check_owner(call);
      const auto claimed = own_number() | claimed_bit;
      if (state.user.compare_exchange_strong(before_, own_number())) return;
      if (before_ == claimed && state.user.compare_exchange_strong(before_, claimed | in_call_bit)) return;
      refuse(call);
    }
    ~Use() { state_.user.store(before_); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    State& state_;
    std::uint64_t before_ = 0;
  };
  [[noreturn]] static void refuse(const char* call) {
    throw UsageError(fmt::format(
        "{}() was called while another thread uses this manager; only one thread at a time may use it",
        call));
  }
  static std::uint64_t own_number() noexcept { return static_cast<std::uint64_t>(ipc::thread_id()); }

  void check_owner(const char* call) const {
    if (getpid() != owner)
      throw UsageError(
          fmt::format("{}() was called in a forked child; the manager belongs to process {}", call, owner));
  }
  std::uint64_t steps() const noexcept { return session->counters(session->word().index).steps; }
  void check_open(const char* call) {
    if (stopped) throw UsageError(fmt::format("{}() was called after stop()", call));
    check_drives(call);
  }
  /// Throws UsageError while the service makes steps in the place of this host.
  void check_drives(const char* call) {
    if (service_drives())
      throw UsageError(
          fmt::format("{}() was called while the service makes steps that were begun before", call));
  }
  bool service_drives() {
    if (!waits_for_service) return false;
    waits_for_service = !link->manager_ended() && client::service_steps(service, 0).under_way;
    if (waits_for_service) return true;
    overwrites = false;
    stepper->touched().committed(session->word().attempt, /*accumulate=*/false);
    return false;
  }
  void take(protocol::Opening opening);
  /// The runners are ready: this host may step.
  void drive(Link to);
  /// Starts a manager over the session. The one before has ended, or was asked to stop.
  void start_over();
  void stop() noexcept;
  void end() noexcept;
  void warn_of_unwritten() noexcept;
  void detach() noexcept;
  void keep_whole() noexcept;

  Config config;
  Run run;  ///< Holds the directory lock until the processes of the manager have ended.
  Origin origin;
  pid_t owner = getpid();
  /// 0, or the thread that uses the handle; with a bit if it has claimed it, and another if it is in a call
  /// meanwhile.
  std::atomic<std::uint64_t> user{0};
  static constexpr std::uint64_t claimed_bit = std::uint64_t{1} << 62, in_call_bit = std::uint64_t{1} << 63;
  int claims = 0;  ///< Of that thread: claims nest.
  bool stopped = false;
  std::string unfinished;
  bool half_written = false;  ///< The parameters: an earlier host has died while it wrote them.
  std::string service;        ///< The path of its socket. Empty: this process has started the manager.
  std::optional<Link> link;   ///< To the process of the manager. Its address does not change.
  std::optional<checkpoint::HostFiles> saved;  ///< What an earlier host of the service has saved.
  int found_steps = 0;
  std::shared_ptr<session::Session> session;
  std::optional<session::HostView> view;
  std::optional<session::SpanWriter> spans;
  std::int64_t writing_since_ns = 0;
  session::Manifest manifest;
  std::optional<Stepper> stepper;
  std::optional<Checkpoints> checkpoints;
  std::uint64_t requests_answered = 0;  ///< Of Control::checkpoint_requests.
  bool waits_for_service = false;
  LeftGradients left = LeftGradients::none;
  bool overwrites = false;  ///< The first step does, whatever its options say.
};

void Handle::State::take(protocol::Opening opening) {
  const auto chosen = config::from_yaml(opening.configuration);
  config.nprocs = chosen.nprocs;
  config.runners.device = chosen.runners.device;
  config.runners.devices = chosen.runners.devices;
  unfinished = std::move(opening.unfinished);
  found_steps = opening.pending_steps;
  waits_for_service = found_steps != 0;
  if (!opening.checkpoint.empty())
    saved = {std::move(opening.checkpoint), std::move(opening.state), std::move(opening.training)};
  session = std::make_shared<session::Session>(session::Session::attach(std::move(opening.session)));
  session->make_private_in_children();
  view.emplace(*session);
  spans.emplace(view->spans());
  ipc::populate(view->gradients(), session->header().bytes.gradients, 1);
  manifest = session::read_manifest(*session);
}

void Handle::State::drive(Link to) {
  link.emplace(std::move(to));
  ipc::populate(view->parameters(), session->header().bytes.parameters, 1);
  left = left_in(*session);
  half_written = session->control().half_written.load() != 0;
  requests_answered = session->control().checkpoint_requests.load();  // Those of earlier hosts.
  stepper.emplace(config, *view, manifest, *link, [this] { return link->end(); });
  checkpoints.emplace(config, run, *view, manifest, *link);
}

void Handle::State::stop() noexcept {
  if (std::exchange(stopped, true)) return;
  if (getpid() != owner) return;  // A forked child must not end the processes of its parent.
  if (!link) return;
  if (link->is_of_service())
    detach();
  else
    end();
}

// Other hosts drive the session from now on, so this process must not be able to write there any more. If it
// is, the service admits no other host until this process has ended.
void Handle::State::detach() noexcept {
  if (session->make_private()) link->leave();
  link->close();
  base::log().info("this host has left the service (pid {})", link->manager_pid());
}

void Handle::State::end() noexcept {
  base::log().info("the manager (pid {}) is asked to stop", link->manager_pid());
  link->leave();
  base::log().info("all processes have ended; the manager: {}", link->end());
  warn_of_unwritten();
  run.lock.reset();
}

void Handle::State::warn_of_unwritten() noexcept try {
  if (!checkpoints) return;
  checkpoints->manager_lost(fmt::format(
      "stop() waits {} s for it; call checkpoints_written() before, which waits for as long as you say",
      timing::manager_stop_s));
  for (const auto& written : checkpoints->written(base::Deadline::at_ns(0)))
    if (!written.error.empty())
      base::log().warn("the checkpoint of step {} was not written: {}", written.step, written.error);
} catch (const std::exception& error) {
  base::log().warn("whether the last checkpoint was written is not known: {}", error.what());
}

Handle::Handle(const Config& config, const StartSettings& settings) {
  if (!manager::initialized())
    throw UsageError(
        "Manager::start() was called without accelmgr::init(); call accelmgr::init(argc, argv) first in "
        "main()");
  config::validate(config);
  const auto begin = base::now_ns();
  base::log().info("a manager is started ({}): model '{}', data source '{}', {} runners",
                   config::name_of(settings.method), config.model.kind, config.data.kind,
                   config.nprocs == one_per_device ? "as many as devices," : std::to_string(config.nprocs));
  state_ = std::make_unique<State>(config, settings);
  auto& state = *state_;
  auto concrete = config;  // With a path in place of `latest`: it is looked up once.
  concrete.checkpoint.resume = state.run.resumed ? state.run.resumed->path : "";
  concrete.parameters.snapshot = false;  // No other host follows this one.
  state.drive(start_manager(concrete, state.origin, [&](protocol::Opening opening) {
    const bool needs_values = opening.needs_values;
    state.take(std::move(opening));
    // No other process works on the session yet.
    if (!settings.continues.empty())
      checkpoint::restore_run(json::parse(settings.continues).at("session"), *state.session);
    if (settings.prepared) settings.prepared(state.session, *state.view, state.manifest, needs_values);
  }));
  base::set_log_step(session()->counters(session()->word().index).steps + 1);
  base::log().info("the manager (pid {}) has {} runners ready, after {:.1f} ms", state_->link->manager_pid(),
                   state_->config.nprocs, double(base::now_ns() - begin) / 1e6);
}

Handle::Handle(const std::string& path, const AttachSettings& settings) {
  if (!manager::initialized())
    throw UsageError(
        "Manager::attach() was called without accelmgr::init(); call accelmgr::init(argc, argv) first in "
        "main()");
  const auto socket = socket_path(path);
  auto link = attach(socket, {.name = settings.name, .patience_s = settings.timeout_s},
                     [&](protocol::Opening opening) {
                       state_ = std::make_unique<State>(opening, socket);
                       state_->take(std::move(opening));
                     });
  state_->drive(std::move(link));
  state_->overwrites = state_->left != LeftGradients::none && !settings.keep_gradients;
  base::set_log_step(session()->counters(session()->word().index).steps + 1);
  base::log().info("this host drives the session of the service (pid {}) at '{}', with lease {}",
                   state_->link->manager_pid(), path, state_->link->lease());
  if (!state_->unfinished.empty()) base::log().warn("{}", state_->unfinished);
  if (state_->overwrites && !is_updated())  // What inner steps leave is of no use.
    base::log().warn(
        "an earlier host has left the gradients of step {}, which it {}: the first step overwrites them",
        session()->counters(session()->word().index).steps,
        state_->left == LeftGradients::applied ? "has applied" : "has not applied");
}

Handle::Handle(Handle&&) noexcept = default;
Handle& Handle::operator=(Handle&&) noexcept = default;
Handle::~Handle() = default;

std::shared_ptr<const session::Session> Handle::session() const { return state_->session; }
const session::HostView& Handle::view() const { return *state_->view; }
const session::Manifest& Handle::manifest() const { return state_->manifest; }
const Config& Handle::config() const { return state_->config; }
const std::string& Handle::unfinished() const { return state_->unfinished; }
LeftGradients Handle::left_gradients() const noexcept { return state_->left; }
bool Handle::overwrites_next() const noexcept { return state_->overwrites; }
const std::optional<ResumedFrom>& Handle::resumed() const {
  auto& state = *state_;
  if (!state.saved) return state.run.resumed;
  auto resumed = resumed_from(*std::exchange(state.saved, std::nullopt));    // It is read once.
  const bool has_extras = !resumed.tensors.empty() || resumed.json != "{}";  // Or no host has saved any yet.
  if (has_extras) state.run.resumed = std::move(resumed);
  return state.run.resumed;
}
const std::string& Handle::run_id() const { return state_->run.id; }
std::string Handle::continuation() const {
  return json{{"run_id", state_->run.id}, {"session", checkpoint::run_state(*session())}}.dump();
}
void Handle::share_with_children() { state_->session->make_private_in_children(/*shared=*/true); }
void Handle::check_owner(const char* call) const { state_->check_owner(call); }

StepResult Handle::step(const StepOptions& options, StepKind kind) {
  return make_step(options, kind, nullptr);
}

StepResult Handle::make_step(const StepOptions& options, StepKind kind, const session::Update* update) {
  const State::Use use(*state_, "step");
  state_->check_open("step");
  const double timeout_s = options.timeout_s.value_or(state_->config.step_timeout);
  if (!(timeout_s >= 0))  // Also true for a NaN.
    throw UsageError(
        fmt::format("step(): timeout is {}; it must be a number of seconds, 0 or more", timeout_s));
  const base::InterruptionScope scope(options.interrupted);
  auto chosen = options;
  chosen.accumulate = options.accumulate && !state_->overwrites;
  const auto steps = state_->steps();
  const auto note_counted = [&] { state_->overwrites = state_->overwrites && state_->steps() == steps; };
  try {
    auto result = state_->stepper->step(chosen, timeout_s, kind, update);
    note_counted();
    return result;
  } catch (const ServiceStands& error) {
    state_->stop();
    throw SessionError(error.what());
  } catch (...) {  // What interrupted it, maybe after the commit.
    note_counted();
    throw;
  }
}

StepResult Handle::step(const StepOptions& options, const session::Update& update) {
  prepare_update(update);
  return make_step(options, StepKind::outer, &update);
}

void Handle::prepare_update(const session::Update& update) {
  for (const auto& tensor : manifest().tensors)
    if (tensor.shares >= 0 && tensor.group != session::Group::frozen)
      throw UsageError(fmt::format(
          "'{}' lies in the memory of another parameter, and both are trained: the session cannot "
          "update them; call the optimizer in the host",
          tensor.name));
  if (view().control().moments_used.load() != update.moments()) {
    clear_moments(update.moments());
    use_moments(update.moments());
  }
}

void Handle::begin_service_steps(int count, const StepOptions& options, const session::Update& update) {
  constexpr const char* call = "begin_steps";
  auto& state = *state_;
  if (!state.link->is_of_service())
    throw UsageError("begin_service_steps() was called for a manager that is no service");
  prepare_update(update);
  const State::Use use(state, call);
  state.check_open(call);
  if (state.overwrites) state.stepper->zero_gradients();
  view().keep_update(update);
  client::begin_service_steps(state.service, count, options,
                              options.timeout_s.value_or(state.config.step_timeout), /*inner=*/true);
  state.waits_for_service = true;
}

ServiceSteps Handle::service_steps(std::size_t known) const {
  return client::service_steps(state_->service, known);
}

void Handle::cancel_service_steps() const {
  client::cancel_service_steps(state_->service, state_->config.step_timeout);
}

int Handle::found_steps() const noexcept { return state_->found_steps; }

void Handle::check_drives(const char* call) const { state_->check_drives(call); }

bool Handle::is_attached() const noexcept { return state_->link->is_of_service(); }

std::uint64_t Handle::updates(std::size_t parameter) const noexcept {
  return view().updated()[parameter].updates_before + session()->updates(session()->word().index)[parameter];
}

void Handle::set_update(std::size_t parameter, std::uint64_t group, std::uint64_t updates) noexcept {
  const std::uint64_t made = session()->updates(session()->word().index)[parameter];
  view().updated()[parameter] = {.group = group, .updates_before = updates - made};
}

void Handle::clear_moments(session::Moments moments) {
  const State::Use use(*state_, "step");
  state_->check_open("step");
  if (!session()->word().closed) throw UsageError("the state of the optimizer was set during a step");
  auto& control = view().control();
  const auto trained = session()->header().bytes.trained;
  const auto bytes_of = [&](session::Moments m) { return static_cast<std::uint64_t>(m) * trained; };
  const auto allocated = control.moments_allocated.load();
  if (moments > allocated) {
    const auto more = bytes_of(moments) - bytes_of(allocated);
    const auto runners = __builtin_popcount(session()->control().team.load());
    session::check_memory(session()->used_bytes(runners) + more,
                          static_cast<std::uint64_t>(state_->config.memory.limit_bytes), more);
    session()->allocate_moments(moments);
    control.moments_allocated.store(moments);
  }
  control.moments_used.store(session::Moments::none);  // Until the caller has written all of them.
  session::best_kernels().zero(view().moments(), bytes_of(moments));
  for (std::size_t i = 0; i < manifest().tensors.size(); ++i) set_update(i, view().updated()[i].group, 0);
}

void Handle::use_moments(session::Moments moments) noexcept { view().control().moments_used.store(moments); }

bool Handle::is_updated() const noexcept {
  const auto& counters = session()->counters(session()->word().index);
  return counters.steps != 0 && counters.applied_step == counters.steps;
}

void Handle::zero_grad() {
  const State::Use use(*state_, "zero_grad");
  state_->check_drives("zero_grad");
  state_->stepper->zero_gradients();
  state_->overwrites = false;
}

void Handle::call(int rank) {
  const State::Use use(*state_, "call");
  state_->check_open("call");
  if (rank < 0 || rank >= session()->ranks())
    throw UsageError(
        fmt::format("call(): rank is {}; the session has ranks 0 to {}", rank, session()->ranks() - 1));
  const auto outcome = state_->stepper->call(rank, state_->config.step_timeout);
  if (outcome.status == StepStatus::ok) return;
  if (outcome.status != StepStatus::runner_lost) throw SessionError(fmt::format("call(): {}", outcome.error));
  const auto causes = last_causes(*session());
  throw RunnerError(fmt::format("call(): {}; what it was to return is lost", text_of(causes)),
                    causes.empty() ? -1 : causes.back().rank, "call");
}

std::vector<bool> Handle::touched() const {
  const State::Use use(*state_, "touched");
  state_->service_drives();  // Or else it takes in what the service's steps have touched.
  return state_->stepper->touched().parameters();
}

void Handle::set_touched(std::span<const std::size_t> parameters, bool touched) {
  const State::Use use(*state_, "set_touched");
  state_->check_drives("set_touched");
  for (const auto parameter : parameters) state_->stepper->touched().set(parameter, touched);
}

void Handle::frozen_written() { view().control().frozen_version.fetch_add(1); }

void Handle::unfreeze(std::span<const std::size_t> parameters) {
  const State::Use use(*state_, "unfreeze");
  state_->check_open("unfreeze");
  if (!session()->word().closed) throw UsageError("parameters may only be unfrozen between steps");
  std::vector<std::size_t> added;
  std::uint64_t bytes = 0, slab_bytes = 0;
  for (const auto i : parameters) {
    const auto& entry = manifest().tensors.at(i);
    if (session::has_gradient(*session(), manifest(), i)) continue;
    if (!entry.has_room())
      throw UsageError(fmt::format(
          "parameter '{}' is {}; it cannot be trained", entry.name,
          entry.is_expanded() ? "expanded (many of its elements are one in memory)" : name_of(entry.dtype)));
    added.push_back(i);
    bytes += entry.gradient_bytes();
    slab_bytes += entry.slab_bytes();
  }
  if (added.empty()) return;
  const auto team = session()->control().team.load();
  const auto runners = __builtin_popcount(team);
  const auto more = bytes + slab_bytes * static_cast<std::uint64_t>(runners);
  session::check_memory(session()->used_bytes(runners) + more,
                        static_cast<std::uint64_t>(state_->config.memory.limit_bytes), more);
  for (const auto i : added) {
    const auto& entry = manifest().tensors[i];
    session()->allocate_room(entry.gradient, entry.gradient_bytes(), entry.slab, entry.slab_bytes(), team);
  }
  // Before the flags: who finds one looks at the bytes first.
  view().control().unfrozen_bytes.fetch_add(bytes);
  view().control().unfrozen_slab_bytes.fetch_add(slab_bytes);
  for (const auto i : added) {
    const auto& entry = manifest().tensors[i];
    ipc::populate(view().gradients() + entry.gradient, entry.gradient_bytes(), 1);
    view().unfrozen()[i].store(1);
  }
}

// If this host dies in the write that follows, the next one finds here what was before. What is half written
// is not kept in its place.
void Handle::State::keep_whole() noexcept {
  if (session->header().has_snapshot == 0 || half_written) return;
  auto& is_whole = view->control().snapshot_is_whole;
  is_whole.store(0);
  std::memcpy(view->snapshot(), view->parameters(), session->header().bytes.parameters);
  view->control().snapshot_applied_step.store(view->control().applied_step.load());
  is_whole.store(1);
}

void Handle::begin_writing(Written written) {
  const State::Use use(*state_, "writing");
  state_->check_drives("writing");
  auto& version = view().control().parameter_version;
  if (version.load() % 2 != 0)
    throw UsageError("parameters are being written already; writing() does not nest");
  if (!session()->word().closed) throw UsageError("parameters may only be written between steps");
  state_->writing_since_ns = base::now_ns();
  state_->keep_whole();
  if (written == Written::all) view().control().frozen_version.fetch_add(1);
  version.fetch_add(1);
  // Before the first write: what is applied in part is not to be applied again.
  view().control().applied_step.store(state_->steps());
}

void Handle::revert_parameters() {
  const State::Use use(*state_, "revert_parameters");
  state_->check_open("revert_parameters");
  auto& control = view().control();
  if (!state_->half_written)
    throw UsageError("revert_parameters() was called, but no earlier host has left parameters half written");
  if (control.snapshot_is_whole.load() == 0)
    throw UsageError(
        "revert_parameters() was called, but the service keeps no whole version: start it with "
        "parameters.snapshot");
  if (is_writing() || !session()->word().closed)
    throw UsageError("parameters may only be written between steps, and not within writing()");
  // If this host dies here too, they are half written as before, and the snapshot is still whole.
  control.parameter_version.fetch_add(1);
  std::memcpy(view().parameters(), view().snapshot(), session()->header().bytes.parameters);
  control.frozen_version.fetch_add(1);
  control.applied_step.store(control.snapshot_applied_step.load());
  control.writes.fetch_add(1);
  control.parameter_version.fetch_add(1);
  state_->half_written = false;
  state_->left = left_in(*session());
}

bool Handle::is_writing() const noexcept { return view().control().parameter_version.load() % 2 != 0; }

void Handle::end_writing(bool whole) noexcept {
  auto& control = view().control();
  if (whole) {
    control.writes.fetch_add(1);
    state_->half_written = false;
  }
  control.parameter_version.fetch_add(1);
  const session::SpanScope span(*state_->spans, session::Activity::write_parameters, state_->steps(),
                                state_->writing_since_ns);
}

std::vector<Value> Handle::buffers() const {
  const State::Use use(*state_, "buffers");
  std::vector<Value> out;
  const auto* copy = session()->result_buffers(session()->word().index);
  for (const auto& entry : manifest().buffers)
    if (entry.of_model) out.push_back({entry.name, entry.dtype, entry.shape, copy + entry.offset});
  return out;
}

void Handle::update_buffers(std::span<const Value> values) {
  const State::Use use(*state_, "update_buffers");
  state_->check_drives("update_buffers");
  const auto& session = *state_->session;
  if (!session.word().closed) throw UsageError("buffers may only be written between steps");
  std::vector<const session::BufferEntry*> entries;
  for (const auto& value : values) entries.push_back(&replaced_by(value, manifest()));
  const auto valid = session.word().index;
  auto& version = view().control().buffer_version;
  version.fetch_add(1);  // Odd: if this process dies now, the next host is told.
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& entry = *entries[i];
    if (entry.bytes == 0) continue;  // An empty value may have a null address.
    std::memcpy(view().result_buffers(valid) + entry.offset, values[i].data, entry.bytes);
    for (int rank = 0; rank < session.ranks(); ++rank)
      std::memcpy(view().buffers(valid, rank) + entry.offset, values[i].data, entry.bytes);
  }
  version.fetch_add(1);  // Runners load them when they begin the next attempt.
}

Statistics Handle::statistics(bool memory) const {
  state_->check_owner("statistics");
  return statistics_of(*state_->session, state_->link->manager_pid(), memory);
}

void Handle::resize(int runners) {
  const State::Use use(*state_, "resize");
  state_->check_open("resize");
  const int most = session()->ranks();
  if (runners < 1 || runners > most)
    throw UsageError(
        fmt::format("resize({}): the session has room for 1 to {} runners (runners.max_runners, or nprocs)",
                    runners, most));
  const double timeout_s = state_->config.start_timeout;
  const base::Patience patience(timeout_s, base::asks_interrupted);
  auto& link = *state_->link;
  link.send(protocol::Resize{runners});
  if (const auto answer = link.take_resized(patience.deadline()); !answer.refused.empty())
    throw SessionError(fmt::format("resize({}): {}; nothing has changed", runners, answer.refused));
  const auto outcome = state_->stepper->assemble(patience);
  if (outcome.status != StepStatus::ok)
    throw RunnerError(fmt::format("resize({}): {}", runners, outcome.error), outcome.rank, "init");
  base::log().info("the team has {} runners, and they are ready", runners);
}

void Handle::recover() {
  const State::Use use(*state_, "recover");
  state_->check_open("recover");
  if (state_->link->is_of_service())
    throw UsageError("recover() was called for a service; attach to it again when it has been started again");
  const auto& link = *state_->link;
  const auto deadline = base::Deadline::in_seconds(timing::killed_manager_ends_s);
  while (!link.wait_until_manager_ended(next_look(deadline)) && !deadline.passed() && !base::interrupted()) {
  }
  if (!state_->stepper->lost_manager().is_lost())
    throw UsageError(fmt::format(
        "recover() was called while the manager process (pid {}) runs; call it when that process is gone",
        link.manager_pid()));
  state_->start_over();
}

void Handle::refresh() {
  const State::Use use(*state_, "refresh");
  state_->check_open("refresh");
  if (state_->link->is_of_service())
    throw UsageError("refresh() was called for a service, whose processes are no forks of this one");
  if (!session()->word().closed && !state_->stepper->lost_manager().is_lost())
    throw UsageError("refresh() was called during a step");
  state_->checkpoints->finish(base::Deadline::in_seconds(timing::checkpoint_write_s));
  state_->link->leave();  // Its processes end while the others begin.
  state_->start_over();
}

bool Handle::fork_server_ended() const noexcept { return state_->link->fork_server_ended(); }

void Handle::State::start_over() {
  try {
    auto other = start_manager_again(config, origin, session->fds(), [this] { link->end(); });
    checkpoints->manager_lost();
    *link = std::move(other);
  } catch (...) {
    link->end();
    throw;
  }
  stepper->lost_manager().recovered();
  base::log().info("a new manager (pid {}) has taken the session over", link->manager_pid());
}

double Handle::save_checkpoint(const Extras& extras) {
  const State::Use use(*state_, "save_checkpoint");
  state_->check_open("save_checkpoint");
  const auto requests = session()->control().checkpoint_requests.load();
  const auto blocked_ms = state_->checkpoints->save(extras);
  state_->requests_answered = requests;
  return blocked_ms;
}

bool Handle::checkpoint_requested() const noexcept {
  return !state_->stopped && session()->control().checkpoint_requests.load() != state_->requests_answered;
}

std::vector<CheckpointWritten> Handle::checkpoints_written(double wait_s) {
  const State::Use use(*state_, "checkpoints_written");
  return state_->checkpoints->written(base::Deadline::in_seconds(wait_s));
}

void Handle::claim(const char* call) {
  state_->check_owner(call);
  const auto claimed = State::own_number() | State::claimed_bit;
  std::uint64_t user = 0;
  if (!state_->user.compare_exchange_strong(user, claimed) && (user & ~State::in_call_bit) != claimed)
    State::refuse(call);
  ++state_->claims;
}

void Handle::release() noexcept {
  if (--state_->claims == 0) state_->user.store(0);
}

void Handle::take_claim() noexcept { state_->user.store(State::own_number() | State::claimed_bit); }

void Handle::stop() {
  const State::Use use(*state_, "stop");
  state_->stop();
}

void Handle::kill() noexcept {
  // A service is not this process's to kill.
  if (state_ && getpid() == state_->owner && state_->link && !state_->link->is_of_service())
    state_->link->kill();
}

}  // namespace accelmgr::client
