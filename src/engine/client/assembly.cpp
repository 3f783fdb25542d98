#include "engine/client/assembly.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/ipc/epoch.hpp"
#include "base/log.hpp"
#include "engine/client/step_report.hpp"
#include "engine/session/device_team.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::client {

Assembly::Assembly(const Config& config, const session::HostView& view, Link& link, LostManager& lost_manager)
    : config_(config),
      view_(view),
      session_(view.session()),
      spans_(view.spans()),
      link_(link),
      lost_manager_(lost_manager),
      even_shares_(session::even_shares(static_cast<std::uint32_t>(config.grad_accumulation_steps))) {
  if (config.runners.share == Share::measured) measured_shares_.emplace(config.grad_accumulation_steps);
}

// An attempt can open when every rank of the team is ready, its pidfd is here, its working state is that of
// the last commit, and elements are assigned to exactly these ranks. Until then the host waits for the
// supervisor and the loader.
Outcome Assembly::assemble(const base::Patience& patience, bool repeat) {
  const session::SpanScope span(spans_, session::Activity::assemble,
                                session_.counters(session_.word().index).steps + 1);
  const auto& control = session_.control();
  for (;;) {
    const auto seen = ipc::load(control.readiness);
    if (lost_manager_.loss() || link_.manager_ended()) return lost_manager_.end(session_.word().attempt);
    check_lease();
    const bool closes = control.closing.load() != 0;
    if (control.given_up.load() != 0) return given_up();  // First: a service that gives up closes, too.
    if (closes) return {StepStatus::manager_lost, "the service is being stopped and makes no more steps"};
    const auto team = control.team.load();
    if (repeat && team != session_.counters(session_.word().index).participants)
      return {StepStatus::runner_lost,
              "the last step cannot be repeated: the team is no longer the one that made it"};
    // The loader follows a request to assign only when the data source returns. Until then no rank may read
    // its queue, and the host must not make another request.
    if (team_ready(team) && loader_follows()) {
      const session::Assignment wanted{team, repeat ? control.assignment.shares : shares_for(team)};
      if (control.assignment == wanted) {
        participants_ = team;
        return {};
      }
      view_.ask_for(wanted);
    }
    if (patience.over())
      return {StepStatus::timeout,
              fmt::format(
                  "no attempt could begin {}: {}{}{}{}", patience.bound(), phases_of(session_, config_, team),
                  loader_follows() ? "" : "; elements cannot be assigned until the data source returns",
                  link_.left_notice().empty() ? "" : "; ", link_.left_notice())};
    ipc::wait_changed(control.readiness, seen, patience.next_look_ns(), 0);
  }
}

bool Assembly::team_ready(session::RankMask team) {
  const auto word = session_.word();
  if (!word.closed) return false;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((team >> rank & 1) == 0) continue;
    const auto& record = session_.record(rank);
    if (record.state.load() != session::RunnerState::ready ||
        record.acknowledged_attempt.load() < word.attempt)
      return false;
    const auto generation = record.generation.load();
    if (!link_.holds(rank, generation)) link_.take_notices();
    if (!link_.holds(rank, generation) || link_.runner_ended(rank)) return false;
  }
  return true;
}

/// Throws SessionError when another host drives the session.
void Assembly::check_lease() const {
  if (const auto lease = session_.control().lease.load(); lease != link_.lease())
    throw SessionError(
        fmt::format("this host does not drive the session any more: its lease was {}, and the "
                    "manager has given lease {} since",
                    link_.lease(), lease));
}

bool Assembly::loader_follows() const noexcept {
  return session_.sharding().follows.load(std::memory_order_acquire) == session_.control().assignments.load();
}

const session::Shares& Assembly::shares_for(session::RankMask team) {
  return measured_shares_ ? measured_shares_->shares_for(team) : even_shares_;
}

void Assembly::measure() {
  if (!measured_shares_) return;
  const auto& request = session_.control().request;
  MicroBatchTimes times{};
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const auto& ballot = session_.record(rank).ballot;
    if ((request.participants >> rank & 1) == 0 || ballot.micro_batches == 0) continue;
    times[static_cast<std::size_t>(rank)] =
        std::max<std::uint64_t>(1, ballot.compute_ns / ballot.micro_batches);
  }
  if (!measured_shares_->note(times)) return;
  const auto& shares = measured_shares_->shares_for(request.participants);
  std::string text;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((request.participants >> rank & 1) == 0) continue;
    text +=
        fmt::format("{}rank {} computes {} ({:.3f} ms each)", text.empty() ? "" : ", ", rank, shares.of[rank],
                    double(measured_shares_->times()[static_cast<std::size_t>(rank)]) / 1e6);
  }
  base::log().info("from the next step on its {} micro-batches are shared anew: {}",
                   session::total_of(shares, request.participants), text);
}

// A team that could not be made is not tried again with the same processes.
session::DeviceTeam Assembly::device_team() noexcept {
  const auto team = session::plan_device_team(session_, participants_);
  device_team_members_ = members_of(team.ranks);
  return device_team_members_ == failed_device_team_ ? session::DeviceTeam{} : team;
}

Assembly::Members Assembly::members_of(session::RankMask ranks) const noexcept {
  Members members{};
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((ranks >> rank & 1) != 0)
      members[static_cast<std::size_t>(rank)] = session_.record(rank).generation.load();
  return members;
}

// A runner that takes the place of another has not made the inner steps before: the host brings it what it
// lacks.
Outcome Assembly::look_for_newcomer() const {
  const auto now = members_of(participants_);
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    if (now[i] != 0 && now[i] != inner_members_[i])
      return {StepStatus::runner_lost,
              fmt::format("runner {} has taken the place of another, and lacks its inner steps: {}", rank,
                          text_of(last_causes(session_))),
              rank};
  }
  return {};
}

void Assembly::device_team_failed(const Outcome& outcome) {
  failed_device_team_ = device_team_members_;
  base::log().warn(
      "rank {}: {}; the step is tried again, and gradients go through the session, not over NCCL, "
      "until a runner of the team is replaced or the team changes",
      outcome.rank, outcome.error);
}

// The supervisor has given up: reports the losses that it found.
Outcome Assembly::given_up() const {
  const auto causes = last_causes(session_);
  const auto& control = session_.control();
  Outcome outcome{StepStatus::runner_lost};
  if (config_.runners.on_loss != LossPolicy::fail)
    outcome.error = fmt::format("{}: ", session::text_of(control.given_up_why));
  outcome.error += text_of(causes);
  if (causes.empty()) return outcome;
  outcome.rank = causes.back().rank;
  const auto& last = session_.incident(control.incidents.load());
  if (last.reason == session::Reason::model_error) outcome.error_type = "ModelError";
  return outcome;
}

}  // namespace accelmgr::client
