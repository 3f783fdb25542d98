#include "meeting.hpp"

#include <signal.h>
#include <unistd.h>

#include <stdexcept>

#include "base/clock.hpp"

namespace accelmgr::collective::contract {
namespace {

constexpr double patience_s = 60;  // Reached only by a test that fails.

}  // namespace

base::UniqueFd Meeting::create() { return ipc::create_memfd("meeting", sizeof(Page)); }

Meeting::Meeting(int fd) : mapping_(fd, 0, sizeof(Page), ipc::Access::read_write) {}

void Meeting::meet(int ranks) {
  const auto deadline = base::Deadline::in_seconds(patience_s);
  awaited_ += static_cast<std::uint32_t>(ranks);
  ipc::advance(page().came);
  for (;;) {
    const auto seen = ipc::load(page().came);
    if (seen >= awaited_) return;
    if (deadline.passed()) throw std::runtime_error("not all ranks came to the meeting");
    ipc::wait_changed(page().came, seen, deadline.remaining_ns(), 0);
  }
}

void Meeting::die(int rank) noexcept {
  page().died_ns[static_cast<std::size_t>(rank)].store(base::now_ns());
  for (;;) kill(getpid(), SIGKILL);
}

}  // namespace accelmgr::collective::contract
