#include "engine/client/handle.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/config/loader.hpp"
#include "base/config/start_method.hpp"
#include "base/interruption.hpp"
#include "base/ipc/memory.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/checkpoint/session_state.hpp"
#include "engine/client/handle_state.hpp"
#include "engine/client/service_name.hpp"
#include "engine/client/statistics.hpp"
#include "engine/client/step_report.hpp"
#include "engine/manager/role.hpp"

namespace accelmgr::client {
namespace {

using nlohmann::json;

/// Throws UsageError, with the name of the call, before accelmgr::init().
void check_initialized(const char* call) {
  if (!manager::initialized())
    throw UsageError(fmt::format(
        "Manager::{}() was called without accelmgr::init(); call accelmgr::init(argc, argv) first in main()",
        call));
}

}  // namespace

Handle::State::State(const Config& of, const StartSettings& settings)
    : config(of),
      run(settings.continues.empty() ? Run(of.checkpoint, settings.lock_checkpoints)
                                     : Run(json::parse(settings.continues).at("run_id").get<std::string>())),
      origin{settings.method, settings.command} {}

Handle::State::State(const protocol::Opening& opening, std::string path)
    : config(config::from_yaml(opening.configuration)),
      run(opening.run_id, opening.tenure),
      service(std::move(path)) {}

void Handle::State::check_open(const char* call) {
  if (stopped) throw UsageError(fmt::format("{}() was called after stop()", call));
  check_drives(call);
}

void Handle::State::check_drives(const char* call) {
  if (service_drives())
    throw UsageError(
        fmt::format("{}() was called while the service makes steps that were begun before", call));
}

bool Handle::State::service_drives() {
  if (!waits_for_service) return false;
  waits_for_service = !link->manager_ended() && client::service_steps(service, 0).under_way;
  if (waits_for_service) return true;
  overwrites = false;
  stepper->touched().committed(session->word().attempt, /*accumulate=*/false);
  return false;
}

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
  if (!user.is_owner()) return;  // A forked child must not end the processes of its parent.
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
  check_initialized("start");
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
  check_initialized("attach");
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
        std::uint64_t{session()->counters(session()->word().index).steps},
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
void Handle::check_owner(const char* call) const { state_->user.check_owner(call); }

StepResult Handle::step(const StepOptions& options, StepKind kind) {
  return make_step(options, kind, nullptr);
}

StepResult Handle::make_step(const StepOptions& options, StepKind kind, const session::Update* update) {
  const State::OpenUse use(*state_, "step");
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
  } catch (const ServiceStalled& error) {
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

void Handle::begin_service_steps(int count, const StepOptions& options, const session::Update& update) {
  constexpr const char* call = "begin_steps";
  auto& state = *state_;
  if (!state.link->is_of_service())
    throw UsageError("begin_service_steps() was called for a manager that is no service");
  prepare_update(update);
  const State::OpenUse use(state, call);
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

void Handle::call(int rank) {
  const State::OpenUse use(*state_, "call");
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

Statistics Handle::statistics(bool memory) const {
  state_->user.check_owner("statistics");
  return statistics_of(*state_->session, state_->link->manager_pid(), memory);
}

void Handle::resize(int runners) {
  const State::OpenUse use(*state_, "resize");
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
  const State::OpenUse use(*state_, "recover");
  if (state_->link->is_of_service())
    throw UsageError("recover() was called for a service; attach to it again when it has been started again");
  const auto& link = *state_->link;
  const auto deadline = base::Deadline::in_seconds(timing::killed_manager_ends_s);
  while (!link.wait_until_manager_ended(next_look(deadline)) && !deadline.passed() && !base::interrupted()) {
  }
  if (!state_->stepper->lost_manager().end_if_lost())
    throw UsageError(fmt::format(
        "recover() was called while the manager process (pid {}) runs; call it when that process is gone",
        link.manager_pid()));
  state_->start_over(/*reads_again=*/false);
}

void Handle::refresh() {
  const State::OpenUse use(*state_, "refresh");
  if (state_->link->is_of_service())
    throw UsageError("refresh() was called for a service, whose processes are no forks of this one");
  if (!session()->word().closed && !state_->stepper->lost_manager().end_if_lost())
    throw UsageError("refresh() was called during a step");
  state_->checkpoints->finish(base::Deadline::in_seconds(timing::checkpoint_write_s));
  state_->link->leave();  // Its processes end while the others begin.
  state_->start_over(/*reads_again=*/true);
}

bool Handle::fork_server_ended() const noexcept { return state_->link->fork_server_ended(); }

void Handle::State::start_over(bool reads_again) {
  try {
    auto other = start_manager_again(config, origin, session->fds(), reads_again, [this] { link->end(); });
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
  const State::OpenUse use(*state_, "save_checkpoint");
  const auto requests = session()->control().checkpoint_requests.load();
  const auto blocked_ms = state_->checkpoints->save(extras);
  state_->requests_answered = requests;
  return blocked_ms;
}

bool Handle::checkpoint_requested() const noexcept {
  return !state_->stopped && session()->control().checkpoint_requests.load() != state_->requests_answered;
}

std::vector<CheckpointWritten> Handle::checkpoints_written(double wait_s) {
  const State::Use use(state_->user, "checkpoints_written");
  return state_->checkpoints->written(base::Deadline::in_seconds(wait_s));
}

void Handle::claim(const char* call) { state_->user.claim(call); }
void Handle::release() noexcept { state_->user.release(); }
void Handle::take_claim() noexcept { state_->user.take_claim(); }

void Handle::stop() {
  const State::Use use(state_->user, "stop");
  state_->stop();
}

void Handle::kill() noexcept {
  // A service is not this process's to kill.
  if (state_ && state_->user.is_owner() && state_->link && !state_->link->is_of_service())
    state_->link->kill();
}

}  // namespace accelmgr::client
