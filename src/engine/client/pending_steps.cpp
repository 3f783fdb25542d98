#include "engine/client/pending_steps.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/ipc/wait_ready.hpp"

namespace accelmgr {

PendingSteps::Core::Core(Source from) : source(std::move(from)), over(eventfd(0, EFD_CLOEXEC)) {
  if (!over) throw SystemError("creating an eventfd", errno);
  const auto run = [this] {
    try {
      for (std::size_t known = 0; !leaves;) {
        std::vector<StepResult> more;
        const bool goes_on = source.next(more, known);
        known += more.size();
        const std::lock_guard lock(mutex);
        std::ranges::move(more, std::back_inserter(made));
        if (!goes_on) break;
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      thrown = std::current_exception();
    }
    source.next = nullptr;  // What it holds is free before anybody hears of the end.
    is_over = true;
    eventfd_write(over.get(), 1);
  };
  try {
    thread = std::thread(run);
  } catch (const std::system_error& error) {
    throw SystemError("starting a thread", error.code().value());
  }
}

PendingSteps::Core::~Core() { leave(); }

void PendingSteps::Core::leave() noexcept {
  leaves = true;
  const std::lock_guard lock(joining);
  if (!thread.joinable()) return;
  if (getpid() == owner)
    thread.join();
  else
    thread.detach();  // A forked child does not have it.
}

bool PendingSteps::done() const noexcept { return core_->is_over; }
int PendingSteps::fileno() const noexcept { return core_->over.get(); }

bool PendingSteps::wait(double timeout_s) const noexcept {
  return ipc::wait_ready(core_->over.get(), POLLIN, base::Deadline::in_seconds(timeout_s)) != 0;
}

std::vector<StepResult> PendingSteps::results() const {
  const std::lock_guard lock(core_->mutex);
  return core_->made;
}

std::vector<StepResult> PendingSteps::result() const {
  wait();
  const std::lock_guard lock(core_->mutex);
  if (core_->thrown) std::rethrow_exception(core_->thrown);
  return core_->made;
}

void PendingSteps::cancel() {
  if (done()) return;
  core_->source.cancel();
  wait();
}

}  // namespace accelmgr
