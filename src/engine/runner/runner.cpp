#include "engine/runner/runner.hpp"
#include "engine/runner/rank_setup.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/cuda/error.hpp"
#include "base/cuda/polling.hpp"
#include "base/exception_text.hpp"
#include "base/fault_point.hpp"
#include "base/ipc/epoch.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/replica/model.hpp"
#include "engine/runner/process.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::runner {
namespace {

using base::FaultPhase;
using session::Activity;
using session::Phase;
using session::Reason;

Activity activity_of(Phase phase) noexcept {
  constexpr Activity activities[]{Activity::none,    Activity::init,     Activity::waiting, Activity::data,
                                  Activity::forward, Activity::backward, Activity::vote,    Activity::reduce,
                                  Activity::update,  Activity::none};
  static_assert(std::size(activities) == static_cast<std::size_t>(Phase::stopping) + 1);
  return activities[static_cast<std::size_t>(phase)];
}

/// "'a', 'b' and 3 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t most = 5;
  const auto shown = std::min(names.size(), most);
  auto text = fmt::format(
      "'{}'", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), "', '"));
  if (names.size() > most) text += fmt::format(" and {} more", names.size() - most);
  return text;
}

}  // namespace

Runner::Runner(const Config& config, const session::RunnerView& runner, int lifeline)
    : config_(config),
      view_(runner),
      session_(runner.session()),
      manifest_(session::read_manifest(session_)),
      rank_(runner.rank()),
      lifeline_(lifeline),
      record_(runner.record()),
      activities_(runner.spans()),
      batches_(config, session_, manifest_, rank_),
      helpers_(streaming_threads(config, session_.header().bytes.gradient_room)),
      gradients_(runner, manifest_),
      reduction_(runner, manifest_),
      update_(runner, manifest_) {
  enter(Phase::init);
  base::fault_point(FaultPhase::init);
  populate();
  const auto begin = base::now_ns();
  replica_ = replica::make_replica(config, replica::Role::runner(rank_));
  record_.model_ns.store(static_cast<std::uint64_t>(base::now_ns() - begin));
  base::in_user_code<ModelError>(fmt::format("model '{}'", config.model.kind), [&] {
    replica::check_same(replica::tensors_of(replica_->describe()), manifest_);
    if (config.runners.parameters == RunnerParameters::bf16) rounded_parameters_.emplace(view_, manifest_);
    const auto places = rounded_parameters_ ? rounded_parameters_->places()
                                            : replica::places_of(view_.parameters(), manifest_);
    replica_->bind({manifest_, places, *this, *this, *this, *this});
    team_part_.emplace(config, view_, *replica_, static_cast<replica::Progress&>(*this));
  });
  if (config.runners.protect_parameters) write_guard_.emplace(view_, manifest_);
  load_committed_state();
}

// Also called between attempts: when the team has grown, the slabs of the new ranks are made present.
void Runner::populate() {
  const auto team = session_.control().team.load();
  if ((team & ~populated_) == 0) return;
  session_.populate_for(rank_, team);
  populated_ |= team;
}

replica::State Runner::state_in(std::uint32_t index) const {
  return {view_.buffers(index), {view_.generator(index), session::generator_bytes}};
}

// A first runner and a replacement both begin with the valid state copy. Which copy is valid is certain once
// the attempt in which the predecessor was lost is closed, and the next attempt waits for this runner. A rank
// that took no part in the last committed step begins with the buffers of its result, as replicas of
// DistributedDataParallel do.
void Runner::load_committed_state() {
  while (!session_.word().closed && !stopping()) {
    const auto seen = ipc::load(session_.control().finish);
    if (!session_.word().closed) ipc::wait_changed(session_.control().finish, seen, timing::look_ns, 0);
  }
  const auto valid = session_.word().index;
  const auto& counters = session_.counters(valid);
  if (counters.steps > 0 && (counters.participants >> rank_ & 1) == 0)
    std::memcpy(view_.buffers(valid), session_.result_buffers(valid), session_.header().buffer_bytes);
  replica_->seed(seed_of_rank(config_, rank_));
  load_state();
  auto generator = state_in(valid);
  generator.buffers = nullptr;
  replica_->save(generator);
  record_.acknowledged_attempt.store(session_.word().attempt);
}

void Runner::load_state() {
  // Read first: if the host writes buffers meanwhile, the next attempt loads them again.
  buffer_version_ = session_.control().buffer_version.load();
  const auto valid = state_in(session_.word().index);
  replica_->load({valid.buffers, valid.generator});
}

void Runner::enter(Phase phase) noexcept { enter(phase, activity_of(phase)); }

void Runner::enter(Phase phase, Activity activity) noexcept {
  record_.phase.store(phase, std::memory_order_relaxed);
  give_sign_of_life();
  enter(activity);
}

// Only a change is worth a look at the clock.
void Runner::enter(Activity activity) noexcept {
  if (activity != activities_.activity()) activities_.enter(activity, base::now_ns());
}

void Runner::give_sign_of_life() noexcept {
  record_.heartbeat.store(record_.heartbeat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

bool Runner::stopping() const {
  if (session_.control().stopping.load() != 0) return true;
  pollfd end{.fd = lifeline_, .events = POLLIN, .revents = 0};
  return poll(&end, 1, 0) > 0;
}

bool Runner::over() const {
  const auto word = session_.word();
  return word.attempt != attempt_ || word.closed || word.abort;
}

bool Runner::is_first() const noexcept {
  const session::RankMask participants = session_.control().request.participants;
  return (participants & ((session::RankMask{1} << rank_) - 1)) == 0;
}

void Runner::built() {
  if (config_.runners.device == Device::cuda) ipc::send(lifeline_, said_built);
}

replica::SharedParameters Runner::share(base::UniqueFd memory) {
  if (!write_guard_) return {};
  shared_ = std::move(memory);
  const auto bytes = session_.header().bytes.parameters;
  shared_to_read_ = ipc::Mapping(shared_.get(), 0, bytes, ipc::Access::read);
  shared_to_write_ = ipc::Mapping(shared_.get(), 0, bytes, ipc::Access::read_write);
  shared_to_read_.keep_from_children();
  shared_to_write_.keep_from_children();
  write_guard_->add(shared_to_read_.data(), shared_.get());
  return {replica::places_of(shared_to_read_.data(), manifest_),
          replica::places_of(shared_to_write_.data(), manifest_)};
}

void Runner::backward_begins() {
  enter(Phase::backward);
  base::fault_point(FaultPhase::backward);
}

bool Runner::wanted() {
  give_sign_of_life();
  left_ = left_ || over() || stopping();
  return !left_;
}

void Runner::serve() {
  const auto& control = session_.control();
  while (session_.control().stopping.load() == 0) {
    const auto seen = ipc::load(control.trigger);
    const auto word = session_.word();
    const bool mine = (control.request.participants >> rank_ & 1) != 0;
    if (word.attempt > record_.acknowledged_attempt.load(std::memory_order_relaxed) && mine) {
      if (!word.closed) {
        attempt(word.attempt);
        enter(Activity::waiting);
        // The runner left the open attempt in order to stop. It must not begin the attempt again: that would
        // add to a slab for which it may have voted.
        if (record_.acknowledged_attempt.load(std::memory_order_relaxed) < word.attempt) break;
        continue;
      }
      attempt_ = word.attempt;
      acknowledge(!word.abort);  // Another rank ended it before this one woke.
    }
    enter(Phase::waiting);
    if (ipc::wait_changed(control.trigger, seen, timing::look_ns, config_.runners.spin_us)) continue;
    if (stopping()) break;
    populate();
  }
  enter(Phase::stopping);
  base::log().debug("stops");
}

void Runner::attempt(std::uint64_t number) {
  attempt_ = number;
  left_ = false;
  record_.attempt.store(number);
  const auto step = session_.counters(session_.word().index).steps + 1;
  base::set_log_step(step);
  activities_.set_attempt(step, number);  // The wait that ends now was for it, too.
  enter(Activity::prepare);
  reduction_.reset_cursor(rank_, number);
  gradients_.begin(number);
  ballot_ = {};
  base::log().debug("attempt {} begins", number);
  try {
    const auto& request = session_.control().request;
    const bool skips = request.skip != 0;
    if (request.applies == session::Applies::session) map_for_updates();
    if (!skips && team_part_->follow(number)) parameter_version_ = unknown_version;
    if (write_guard_) write_guard_->begin();
    replica_->begin_attempt();
    if (buffer_version_ != session_.control().buffer_version.load()) load_state();  // The host wrote buffers.
    if (request.call != 0) {
      ballot_.parameter_version = request.parameter_version;
      if (request.call == static_cast<std::uint32_t>(rank_) + 1) replica_->call();
    } else if (skips) {
      skip();
    } else {
      compute();
    }
    vote();
  } catch (const AttemptRefused& refusal) {
    if (refusal.reason != Reason::none)
      session::refuse_attempt(view_, number, refusal.reason, refusal.what.c_str());
  } catch (...) {  // User code: a model may throw any type.
    if (!refuse()) throw;
  }
  const auto& control = session_.control();
  for (;;) {
    const auto seen = ipc::load(control.votes);
    const auto word = session_.word();
    if (word.attempt == number && word.committed(control.request.participants)) break;
    if (over()) return acknowledge(word.attempt == number && word.closed && !word.abort);
    enter(Phase::vote, Activity::other_votes);
    if (!ipc::wait_changed(control.votes, seen, timing::look_ns, config_.runners.spin_us) && stopping())
      return;
  }
  enter(Phase::reduce);
  reduction_.finish_slice(rank_, number, &helpers_);
  if (session::updates_parameters(session_)) update();
  if (control.request.applies >= session::Applies::replicas) return apply();
  acknowledge(true);
  base::fault_point(FaultPhase::close);
  session::close_if_over(view_, number);
}

void Runner::map_for_updates() {
  if (!config_.runners.protect_parameters || parameters_to_write_) return;
  parameters_to_write_ = session_.writable_parameters();
  update_.write_at(parameters_to_write_.data());
}

// The mean is whole when all slices are reduced: the last one to finish wakes the others.
void Runner::update() {
  const auto& finish = session_.control().finish;
  enter(Phase::update);
  for (bool is_last = true;; is_last = false) {
    const auto seen = ipc::load(finish);
    if (session::slices_finished(session_, attempt_)) {
      if (is_last) view_.announce_reduced();
      break;
    }
    if (stopping()) return;
    ipc::wait_changed(finish, seen, timing::look_ns, config_.runners.spin_us);
    give_sign_of_life();
  }
  update_.finish_slice(rank_, attempt_, &helpers_);
}

// The mean is whole when the attempt is closed. The host changes it only when all runners have applied it.
void Runner::apply() {
  enter(Phase::update);
  const auto& finish = session_.control().finish;
  base::fault_point(FaultPhase::close);
  session::close_if_over(view_, attempt_);
  for (;;) {
    const auto seen = ipc::load(finish);
    if (session_.word().closed) break;
    if (stopping()) return;
    ipc::wait_changed(finish, seen, timing::look_ns, 0);
  }
  std::vector<const std::byte*> mean(keeps_gradients() ? 0 : manifest_.tensors.size());
  for (std::size_t i = 0; i < mean.size(); ++i)
    if (session::gave_gradient(session_, i, attempt_))
      mean[i] = session_.gradients() + manifest_.tensors[i].gradient;
  const auto& request = session_.control().request;
  const auto scale = session::gradient_scale(request, session::tally(session_, request));
  record_.grad_norm.store(replica_->apply(mean, scale));
  acknowledge(true);
}

// Called in the handler of an exception of the replica. Returns whether the runner goes on.
bool Runner::refuse() {
  if (const auto failure = team_part_->failure(); !failure.empty()) {
    session::refuse_attempt(view_, attempt_, Reason::team, failure.c_str());
    return true;
  }
  const auto text = base::current_exception_text();
  auto reason = Reason::exception;
  try {
    throw;
  } catch (const ModelError&) {
    reason = Reason::model_error;
  } catch (const device::DeviceError&) {
    if (loses_a_member()) reason = Reason::lost_with_another;
  } catch (...) {
    // Reason::exception stands.
  }
  session::refuse_attempt(view_, attempt_, reason, text.c_str());
  return false;
}

// A member of the team that dies can break the devices of the others on its machine, and they may see that
// before the supervisor sees the death.
bool Runner::loses_a_member() {
  const auto goes_on = [&] {
    give_sign_of_life();
    return !stopping();
  };
  return team_part_->in_team() && device::poll_until([&] { return team_part_->lost_members() != 0; }, goes_on,
                                                     timing::killed_child_ends_s) == device::Waited::done;
}

// Skips destructors: they would give back memory that NCCL may still write to.
void Runner::never_ends(const std::string& what) {
  const auto text = fmt::format("{}; the process ends", what);
  const auto reason = team_part_->lost_members() != 0 ? Reason::lost_with_another : Reason::exception;
  session::refuse_attempt(view_, attempt_, reason, text.c_str());
  base::log().info("{}", text);
  std::fflush(nullptr);
  _exit(exit_failed);
}

// After an abort, loads the working state of the last commit: the attempt leaves no trace.
void Runner::acknowledge(bool committed) {
  if (!committed) {
    try {
      if (team_part_->abandon()) parameter_version_ = unknown_version;
      load_state();
    } catch (const device::DeviceError&) {
      refuse();
      throw;
    }
  }
  base::log().debug("attempt {} is {}", attempt_, committed ? "committed" : "over without a result");
  record_.acknowledged_attempt.store(attempt_);
  view_.announce_readiness();
}

std::optional<Batches::Filled> Runner::next_batch() {
  enter(Phase::data);
  const auto give_up = [&] {
    give_sign_of_life();
    return over() || stopping();
  };
  return batches_.next(ballot_.micro_batches, give_up, ballot_.data_ns);
}

// The divisor makes the sum over the micro-batches of all runners a mean. With loss_scaling=samples a partial
// batch weighs less, by its number of samples. With sum and sum_over it stays a sum; the reduction divides
// it. The loss scale is part of the divisor, so no replica knows of it.
void Runner::micro_batch(Batches::Filled filled) {
  const auto& request = session_.control().request;
  using session::LossWeights;
  const bool is_sum = request.loss_weights == LossWeights::none || request.loss_weights == LossWeights::field;
  auto divisor = is_sum ? 1.0 : double(session::total_of(request.shares, request.participants));
  if (request.loss_weights == LossWeights::samples && filled.elements != request.batch_size)
    divisor *= double(request.batch_size) / double(filled.elements);
  divisor /= request.loss_scale;
  enter(Phase::forward);
  if (base::fault_point(FaultPhase::forward) == base::FaultEffect::nan)
    divisor = std::numeric_limits<double>::quiet_NaN();
  replica_->run(batches_.fields_of(filled), divisor);
  if (const auto name = write_guard_ ? write_guard_->check() : ""; !name.empty()) {
    replica_->parameter_changed(name);
    throw ModelError(
        fmt::format("forward() or backward() changed the parameter '{}' and did not put it back: parameters "
                    "are the host's, "
                    "and the change would be lost. Make it a buffer, change it between steps in the host, "
                    "or, with one runner, "
                    "set runners.protect_parameters=false",
                    name));
  }
  ballot_.samples += filled.elements;
  ballot_.elements += filled.elements + filled.left_out;
  ++ballot_.micro_batches;
}

void Runner::load_parameters() {
  const auto frozen = session_.control().frozen_version.load();
  frozen_are_stale_ = parameter_version_ == unknown_version || frozen_version_ != frozen;
  frozen_version_ = frozen;
  if (rounded_parameters_) rounded_parameters_->load([this](std::size_t i) { return is_stale(i); });
  replica_->load_parameters();
}

void Runner::compute() {
  const auto& control = session_.control();
  base::fault_point(FaultPhase::load_parameters);
  ballot_.parameter_version = control.parameter_version.load();
  if (ballot_.parameter_version != control.request.parameter_version)
    throw AttemptRefused{Reason::parameters_changed, "the parameters were written while the step began"};
  if (parameter_version_ != ballot_.parameter_version) load_parameters();
  parameter_version_ = unknown_version;  // A device may load them with the first batch, or abandon an upload.
  const auto begin = base::now_ns();
  const auto share = control.request.shares.of[rank_];
  for (std::uint32_t i = 0; i < share && !over(); ++i) {
    const auto filled = next_batch();
    if (!filled) break;
    const bool ends = filled->elements < control.request.batch_size;
    last_micro_batch_ = ends || i + 1 == share;
    micro_batch(*filled);
    if (ends) break;
  }
  if (ballot_.micro_batches == 0 && over())
    throw AttemptRefused{Reason::none, {}};  // There is nothing to collect.
  collect();
  parameter_version_ = ballot_.parameter_version;
  ballot_.compute_ns = static_cast<std::uint64_t>(base::now_ns() - begin) - ballot_.data_ns;
  ballot_.range = gradients_.range();
  check_finite();
}

void Runner::check_finite() {
  const auto loss_scale = session_.control().request.loss_scale;
  const auto names = gradients_.nonfinite();
  const bool good_weight = std::isfinite(ballot_.weight) && ballot_.weight >= 0;
  const bool finite_loss = std::isfinite(ballot_.loss) && good_weight;
  if (names.empty() && finite_loss) return;
  if (!good_weight)
    return found_nonfinite(
        false, fmt::format("'{}' of the model's outputs adds up to {}, by which "
                           "loss_scaling sum_over({}) cannot divide",
                           config_.loss_scaling.field, ballot_.weight, config_.loss_scaling.field));
  const auto scale = loss_scale == 1 ? "" : fmt::format(", loss scale {}", loss_scale);
  found_nonfinite(finite_loss, names.empty() ? fmt::format("the loss is {}", ballot_.loss)
                                             : fmt::format("the gradient of {} is not finite (loss {}{})",
                                                           listed(names), ballot_.loss, scale));
}

// The last voter sees all ballots and slabs, which do not change any more. Gradients that are finite in each
// slab may not be so in their sum, or in the sum of several steps.
void Runner::check_sums() {
  const auto& request = session_.control().request;
  if (request.skip != 0 || session::tally(session_, request).nonfinite ||
      session::sums_fit(session_, request))
    return;
  std::vector<std::string> names;
  for (const auto tensor : reduction_.nonfinite_sums(attempt_))
    names.push_back(manifest_.tensors[tensor].name);
  if (keeps_gradients())  // Nothing is added. Only the replica knows which gradient it is.
    found_nonfinite(true, "a gradient is finite, but not when it is divided by the weight of the step");
  else if (!names.empty())
    found_nonfinite(true,
                    fmt::format("the gradient of {} is finite in each rank, but not its sum{}", listed(names),
                                request.accumulate != 0 ? " with the steps before" : ""));
  else
    return;
  record_.ballot.nonfinite = 1;
}

// `scaled`: the loss scale may be the cause. Throws unless the policy is `keep`.
void Runner::found_nonfinite(bool scaled, const std::string& what) {
  const auto& request = session_.control().request;
  const bool overflow = scaled && request.refuse_overflow != 0;
  ballot_.nonfinite = 1;
  if (overflow || request.refuse_nonfinite != 0)
    throw AttemptRefused{overflow ? Reason::overflow : Reason::nonfinite, what};
}

void Runner::collect() {
  const auto totals = replica_->collect();
  if (left_) throw AttemptRefused{Reason::none, {}};  // The gradients may be incomplete.
  team_part_->done();
  ballot_.loss = totals.loss / session_.control().request.loss_scale;
  keep_weight(totals.scalars);
  keep_scalars(totals.scalars);
}

// The number by whose total the reduction divides.
void Runner::keep_weight(const std::vector<std::pair<std::string, double>>& scalars) {
  const auto& name = config_.loss_scaling.field;
  if (name.empty() || ballot_.micro_batches == 0) return;
  const auto found = std::ranges::find(scalars, name, &std::pair<std::string, double>::first);
  if (found == scalars.end())
    throw ModelError(fmt::format(
        "the model's outputs have no number '{}', by whose total loss_scaling sum_over({}) divides", name,
        name));
  ballot_.weight = found->second / session_.control().request.loss_scale;
}

void Runner::keep_scalars(const std::vector<std::pair<std::string, double>>& scalars) {
  std::vector<std::string> left_out;
  for (const auto& [name, sum] : scalars) {
    if (ballot_.scalars == session::max_scalars || name.size() >= session::scalar_name_bytes) {
      left_out.push_back(name);
      continue;
    }
    auto& scalar = ballot_.scalar[ballot_.scalars++];
    name.copy(scalar.name, name.size());
    scalar.sum = sum / session_.control().request.loss_scale;
  }
  if (!left_out.empty() && !told_of_scalars_) tell_of_scalars(left_out);
}

// Logged once per runner, and as a warning by the first rank only: all ranks have the same model.
void Runner::tell_of_scalars(const std::vector<std::string>& left_out) {
  told_of_scalars_ = true;
  base::log().log(
      is_first() ? base::LogLevel::warning : base::LogLevel::info,
      "the numbers {} of the model's output are left out of the results: a result holds at most {}, "
      "with names shorter than {} bytes",
      listed(left_out), session::max_scalars, session::scalar_name_bytes);
}

// Consumes the batches that compute() would consume, so that the next attempt gets the batches after them.
void Runner::skip() {
  const auto& request = session_.control().request;
  ballot_.parameter_version = request.parameter_version;
  while (ballot_.micro_batches < request.shares.of[rank_]) {
    const auto filled = next_batch();
    if (!filled) break;
    ballot_.elements += filled->elements + filled->left_out;
    ++ballot_.micro_batches;
    if (filled->elements < request.batch_size) break;
  }
}

void Runner::vote() {
  enter(Phase::vote);
  if (over()) return;
  replica_->save(state_in(session_.word().index ^ 1));
  record_.ballot = ballot_;
  base::fault_point(FaultPhase::vote);
  base::log().debug(
      "attempt {}: votes, with loss {} of {} samples, {:.3f} ms of computing, {:.3f} ms of waiting for data",
      attempt_, ballot_.loss, ballot_.samples, double(ballot_.compute_ns) / 1e6,
      double(ballot_.data_ns) / 1e6);
  if (session::cast_vote(view_, attempt_, /*may_commit=*/false) == session::Vote::would_commit) {
    check_sums();
    session::cast_vote(view_, attempt_);
  }
  base::fault_point(FaultPhase::voted);
}

}  // namespace accelmgr::runner
