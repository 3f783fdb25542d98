#include <cstdint>
#include <utility>

#include "launcher/launch/run/detached_contexts.hpp"
#include "launcher/launch/run/processes.hpp"

namespace accelmgr::launch {
namespace {

base::Deadline deadline_of(std::optional<double> timeout_s) {
  return timeout_s ? base::Deadline::in_seconds(*timeout_s) : base::Deadline::at_ns(INT64_MAX);
}

void let_go(std::unique_ptr<SpawnContext::Processes> processes) noexcept {
  if (!processes || !processes->running() || !processes->is_ours()) return;
  if (processes->daemon())
    processes->terminate();
  else
    detach(std::move(processes));
}

}  // namespace

SpawnContext::SpawnContext(std::unique_ptr<Processes> processes) noexcept
    : processes_(std::move(processes)) {}
SpawnContext::SpawnContext(SpawnContext&&) noexcept = default;

SpawnContext& SpawnContext::operator=(SpawnContext&& other) noexcept {
  if (this != &other) let_go(std::exchange(processes_, std::move(other.processes_)));
  return *this;
}

SpawnContext::~SpawnContext() { let_go(std::move(processes_)); }

bool SpawnContext::join(std::optional<double> timeout_s) { return processes_->join(deadline_of(timeout_s)); }
std::vector<pid_t> SpawnContext::pids() const { return processes_->pids(); }
std::vector<ProcessState> SpawnContext::processes() { return processes_->states(); }
bool SpawnContext::wait(int local_rank, std::optional<double> timeout_s) {
  return processes_->wait(local_rank, deadline_of(timeout_s));
}
void SpawnContext::terminate() noexcept { processes_->terminate(); }
void SpawnContext::hold(std::shared_ptr<void> object) { processes_->hold(std::move(object)); }
const std::vector<Value>& SpawnContext::results() const noexcept { return processes_->results(); }

}  // namespace accelmgr::launch
