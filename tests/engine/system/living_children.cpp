#include "living_children.hpp"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "stage.hpp"

namespace accelmgr::test {
namespace {

pid_t forked() {
  const pid_t pid = fork();
  if (pid < 0) throw SystemError("forking a child", errno);
  if (pid > 0) return pid;
  prctl(PR_SET_NAME, "user's child");  // The killer goes by names.
  for (;;) pause();
}

pid_t executed() {
  char* const environment[] = {nullptr};
  return execute_sleep("infinity", environment);
}

}  // namespace

void LivingChildren::add() {
  constexpr std::size_t most = 4;
  if (pids_.size() == most) end_oldest();
  pids_.push_back(added_++ % 2 == 0 ? forked() : executed());
}

void LivingChildren::end_oldest() noexcept {
  kill(pids_.front(), SIGKILL);
  waitpid(pids_.front(), nullptr, 0);
  pids_.pop_front();
}

}  // namespace accelmgr::test
