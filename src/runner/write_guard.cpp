#include "runner/write_guard.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>

#include "accelmgr/errors.hpp"
#include "ipc/memory.hpp"
#include "runner/process.hpp"
#include "session/attempt.hpp"

namespace accelmgr::runner {
namespace {

constexpr double most_rounding = 1e-4;  // Of a parameter that was put back, relative to its largest element.

struct Region {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;  ///< Whole pages.
  int fd = -1;
  off_t offset = 0;
};
enum Pages : int { of_master, changing, own };

// Set before the handlers are installed and constant afterwards, so that a signal handler may read them.
const session::RunnerView* guarded = nullptr;
Region region;
std::atomic<int> pages{of_master};
alignas(16) std::byte handler_stack[64 * 1024];

/// Maps the parameters anew. Safe in a signal handler.
bool map(int protection, int flags) noexcept {
  void* made = mmap(region.begin, region.bytes, protection, flags | MAP_FIXED, region.fd, region.offset);
  return made != MAP_FAILED && madvise(made, region.bytes, MADV_DONTFORK) == 0;
}

// Several threads of a model may write at once. One makes the pages the process's own; the others try again
// then.
void on_fault(int signal_number, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  const bool sent = info->si_code <= 0;  // A process sent the signal: no instruction has faulted.
  if (sent || address < region.begin || address >= region.begin + region.bytes) {
    signal(signal_number, SIG_DFL);  // The instruction faults again, now with the default action.
    if (sent) raise(signal_number);
    return;
  }
  int expected = of_master;
  if (!pages.compare_exchange_strong(expected, changing)) {
    while (pages.load() == changing) sched_yield();
    return;
  }
  if (map(PROT_READ | PROT_WRITE, MAP_PRIVATE)) return pages.store(own);
  session::refuse_attempt(
      *guarded, guarded->session().word().attempt, session::Reason::exception,
      "the model wrote into its parameters, and there is no memory for a copy of its own");
  _exit(exit_failed);
}

/// Whether the elements differ by more than rounding.
template <class T>
bool moved(const std::byte* now, const std::byte* before, std::uint64_t count) {
  const auto* one = reinterpret_cast<const T*>(now);
  const auto* other = reinterpret_cast<const T*>(before);
  double largest = 0, difference = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (std::isnan(one[i]) != std::isnan(other[i])) return true;
    if (one[i] == other[i] || std::isnan(one[i])) continue;  // Also two infinities.
    difference = std::max(difference, std::abs(double(one[i]) - double(other[i])));
  }
  if (difference == 0) return false;
  for (std::uint64_t i = 0; i < count; ++i)
    if (std::isfinite(other[i])) largest = std::max(largest, std::abs(double(other[i])));
  return difference > most_rounding * largest;
}

}  // namespace

WriteGuard::WriteGuard(const session::RunnerView& runner, const session::Manifest& manifest)
    : runner_(runner), manifest_(manifest) {
  constexpr std::size_t page = 4096;
  const auto& session = runner.session();
  guarded = &runner;
  region = {.begin = runner.parameters(),
            .bytes = (session.master_bytes() + page - 1) / page * page,
            .fd = session.fds().front(),
            .offset = static_cast<off_t>(session.parameters_offset())};
  const stack_t stack{.ss_sp = handler_stack, .ss_flags = 0, .ss_size = sizeof handler_stack};
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void WriteGuard::begin() {
  if (pages.load() == of_master) return;
  if (!map(PROT_READ, MAP_SHARED)) throw SystemError("mapping the master parameters again", errno);
  pages.store(of_master);
  ipc::populate_read(region.begin, region.bytes);
}

void WriteGuard::check() {
  if (pages.load() == of_master) return;
  const ipc::Mapping master(region.fd, static_cast<std::uint64_t>(region.offset), region.bytes,
                            ipc::Access::read);
  const auto element = runner_.session().header().element;
  const auto bytes = session::bytes_of(element);
  std::string name;
  for (const auto& tensor : manifest_.tensors) {
    const auto* now = region.begin + tensor.first * bytes;
    const auto* before = master.data() + tensor.first * bytes;
    const bool is_moved = element == session::Element::f32 ? moved<float>(now, before, tensor.count)
                                                           : moved<double>(now, before, tensor.count);
    if (is_moved && name.empty()) name = tensor.name;
  }
  begin();
  if (!name.empty())
    throw ModelError(fmt::format(
        "forward() or backward() changed the parameter '{}' and did not put it back: parameters are the "
        "host's, "
        "and the change would be lost. Make it a buffer, change it between steps in the host, or, with one "
        "runner, set runners.protect_parameters=false",
        name));
}

}  // namespace accelmgr::runner
