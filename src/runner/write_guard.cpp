#include "runner/write_guard.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "runner/process.hpp"
#include "session/attempt.hpp"

namespace accelmgr::runner {
namespace {

// Set before the handlers are installed and constant afterwards, so that a signal handler may read them.
const session::RunnerView* guarded = nullptr;
const session::Manifest* guarded_manifest = nullptr;
alignas(16) std::byte handler_stack[64 * 1024];

void on_fault(int signal_number, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  const auto& session = guarded->session();
  const auto* begin = session.parameters();
  const bool sent = info->si_code <= 0;  // A process sent the signal: no instruction has faulted.
  if (sent || address < begin || address >= begin + session.master_bytes()) {
    signal(signal_number, SIG_DFL);  // The instruction faults again, now with the default action.
    if (sent) raise(signal_number);
    return;
  }
  const auto element =
      static_cast<std::uint64_t>(address - begin) / session::bytes_of(session.header().element);
  const char* name = "?";
  for (const auto& tensor : guarded_manifest->tensors)
    if (element >= tensor.first && element < tensor.first + tensor.count) name = tensor.name.c_str();
  char text[session::text_bytes];
  std::snprintf(text, sizeof text,
                "the model wrote into its parameter '%s', which belongs to the host; make it a buffer, or "
                "set runners.protect_parameters=false",
                name);
  session::refuse_attempt(*guarded, session.word().attempt, session::Reason::exception, text);
  _exit(exit_failed);
}

}  // namespace

void guard_parameters(const session::RunnerView& runner, const session::Manifest& manifest) {
  guarded = &runner;
  guarded_manifest = &manifest;
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
