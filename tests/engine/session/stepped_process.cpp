#include "stepped_process.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "accelmgr/errors.hpp"

namespace accelmgr::session {
namespace {

constexpr int refused = 77;

[[noreturn]] void run_traced(const std::function<void()>& work) {
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(refused);
  raise(SIGSTOP);
  work();
  _exit(0);
}

}  // namespace

SteppedProcess::SteppedProcess(const std::function<void()>& work) {
  pid_ = fork();
  if (pid_ < 0) throw SystemError("fork of a process to be stepped", errno);
  if (pid_ == 0) run_traced(work);
  const int status = wait();
  if (WIFEXITED(status)) throw SystemError("ptrace of a child", EPERM);
  if (ptrace(PTRACE_SETOPTIONS, pid_, nullptr, PTRACE_O_EXITKILL) != 0) {
    const int error = errno;
    kill();
    throw SystemError("ptrace of a child", error);
  }
}

/// Waits until the child stops or ends. Reaps it if it has ended.
int SteppedProcess::wait() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0)
    if (errno != EINTR) throw SystemError("waitpid of a stepped process", errno);
  if (!WIFSTOPPED(status)) pid_ = 0;
  return status;
}

bool SteppedProcess::step() {
  if (pid_ == 0 || !resume(PTRACE_SINGLESTEP)) return false;
#ifdef __x86_64__
  return !reads_the_clock() || finish_reading();
#else
  return true;
#endif
}

/// Continues the child until it stops. Returns false if it has ended with status 0.
bool SteppedProcess::resume(int request) {
  if (ptrace(static_cast<__ptrace_request>(request), pid_, nullptr, nullptr) != 0)
    throw SystemError("ptrace of a step", errno);
  const int status = wait();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return false;
  if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP)
    throw std::runtime_error(fmt::format("the stepped process has the wait status {:#x}", status));
  return true;
}

#ifdef __x86_64__

// True if the child runs in the vdso, the kernel's code that every process has mapped.
bool SteppedProcess::reads_the_clock() {
  static const auto vdso = getauxval(AT_SYSINFO_EHDR);
  constexpr std::uint64_t vdso_bytes = 8192;
  user_regs_struct registers{};
  ptrace(PTRACE_GETREGS, pid_, nullptr, &registers);
  return registers.rip >= vdso && registers.rip < vdso + vdso_bytes;
}

/// Runs to a breakpoint at the return address.
bool SteppedProcess::finish_reading() {
  user_regs_struct registers{};
  ptrace(PTRACE_GETREGS, pid_, nullptr, &registers);
  const auto caller = ptrace(PTRACE_PEEKDATA, pid_, registers.rsp, nullptr);
  const auto code = ptrace(PTRACE_PEEKDATA, pid_, caller, nullptr);
  constexpr long breakpoint = 0xcc;
  ptrace(PTRACE_POKEDATA, pid_, caller, (code & ~0xffL) | breakpoint);
  if (!resume(PTRACE_CONT)) return false;
  ptrace(PTRACE_POKEDATA, pid_, caller, code);
  ptrace(PTRACE_GETREGS, pid_, nullptr, &registers);
  registers.rip = static_cast<std::uint64_t>(caller);
  ptrace(PTRACE_SETREGS, pid_, nullptr, &registers);
  return true;
}

#endif

bool SteppedProcess::step(std::uint64_t count) {
  while (count-- > 0)
    if (!step()) return false;
  return true;
}

void SteppedProcess::kill() noexcept {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = 0;
}

OnOneCore::OnOneCore() {
  sched_getaffinity(0, sizeof before_, &before_);
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(static_cast<std::size_t>(sched_getcpu()), &here);
  sched_setaffinity(0, sizeof here, &here);
}

OnOneCore::~OnOneCore() { sched_setaffinity(0, sizeof before_, &before_); }

}  // namespace accelmgr::session
