#include "engine/session/views.hpp"

#include "engine/session/sequence_lock.hpp"

namespace accelmgr::session {

void View::wake_everyone() const noexcept {
  auto& control = memory().control();
  for (ipc::Epoch* epoch : {&control.trigger, &control.votes, &control.finish, &control.readiness})
    ipc::wake_all(*epoch);
  for (int rank = 0; rank < session().ranks(); ++rank) ipc::wake_all(memory().queue(rank).filled);
}

void HostView::ask_for(const Assignment& assignment) const noexcept {
  control().assignment = assignment;
  control().assignments.fetch_add(1);
  for (auto* epoch : {&memory().control().finish, &memory().control().trigger}) ipc::wake_all(*epoch);
}

// A host that is killed in between leaves the previous update valid.
void HostView::keep_update(const Update& update) const noexcept {
  const auto asked = control().updates_asked.load() + 1;
  control().updates[asked % 2] = update;
  control().updates_asked.store(asked);
}

void SupervisorView::clear_record(int rank) const noexcept {
  auto& record = memory().record(rank);
  record.pid.store(0);
  record.log.written.store(0);
  record.phase.store(Phase::init);
}

HalfWritten SupervisorView::settle_host() const noexcept {
  HostControl& host = memory().control();
  const auto settle = [](Version& version) {
    const bool is_half = is_written(version);
    if (is_half) end_write(version);  // A new version: processes load what is there now.
    return is_half;
  };
  // The loader reads `assignment` only after `assignments` has changed, so then it is complete.
  const auto& sharding = session().sharding();
  if (sharding.follows.load(std::memory_order_acquire) == host.assignments.load())
    host.assignment = {sharding.assigned_to.load(), sharding.shares};
  const bool is_half = settle(host.parameter_version);
  // A host that ends between its steps may have written parameters without saying so.
  if (!is_half) host.parameter_version.fetch_add(2);
  host.frozen_version.fetch_add(1);
  return {.parameters = is_half, .buffers = settle(host.buffer_version)};
}

void SupervisorView::take_over() const noexcept {
  control().given_up.store(0);
  memory().control().stopping.store(0);
  control().managers.fetch_add(1);
  for (int rank = 0; rank < session().ranks(); ++rank) {
    record(rank).state.store(RunnerState::absent);
    record(rank).pid.store(0);
  }
}

}  // namespace accelmgr::session
