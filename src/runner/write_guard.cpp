#include "runner/write_guard.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "runner/runner.hpp"
#include "session/attempt.hpp"

namespace accelmgr::runner {
namespace {

// Set before the handlers are installed, constant afterwards: all that a signal handler may rely on.
const session::Session* guarded_session = nullptr;
const session::Manifest* guarded_manifest = nullptr;
int guarded_rank = -1;
alignas(16) std::byte handler_stack[64 * 1024];

void on_fault(int signal_number, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  const auto* begin = guarded_session->parameters();
  const bool sent = info->si_code <= 0;  // By a process: no instruction has faulted.
  if (sent || address < begin || address >= begin + guarded_session->master_bytes()) {
    signal(signal_number, SIG_DFL);  // The instruction faults again, and the process ends as it would have.
    if (sent) raise(signal_number);
    return;
  }
  const auto element =
      static_cast<std::uint64_t>(address - begin) / session::bytes_of(guarded_session->header().element);
  const char* name = "?";
  for (const auto& tensor : guarded_manifest->tensors)
    if (element >= tensor.first && element < tensor.first + tensor.count) name = tensor.name.c_str();
  char text[session::text_bytes];
  std::snprintf(text, sizeof text,
                "the model wrote into its parameter '%s', which belongs to the host; make it a buffer, or "
                "set runners.protect_parameters=false",
                name);
  session::refuse_attempt(*guarded_session, guarded_session->word().attempt, guarded_rank,
                          session::Reason::exception, text);
  _exit(exit_failed);
}

}  // namespace

void guard_parameters(const session::Session& session, const session::Manifest& manifest, int rank) {
  guarded_session = &session;
  guarded_manifest = &manifest;
  guarded_rank = rank;
  const stack_t stack{.ss_sp = handler_stack, .ss_flags = 0, .ss_size = sizeof handler_stack};
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace accelmgr::runner
