#include "engine/runner/write_guard.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/pages.hpp"
#include "engine/runner/process.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::runner {
namespace {

// The largest difference that counts as rounding in a parameter that was put back, relative to its largest
// element: two units in the last place of 16 bits.
constexpr double most_rounding = 1e-4, most_bfloat16_rounding = 1.0 / 64, most_float16_rounding = 1.0 / 512;

enum Pages : int { shared, changing, own };
struct Region {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;  ///< Whole pages.
  int fd = -1;
  off_t offset = 0;
  std::atomic<int> pages{shared};
};

// Set while no model computes, so that a signal handler may read them.
const session::RunnerView* guarded = nullptr;
Region regions[2];  // The second one, and its bytes, are empty until add().
alignas(16) std::byte handler_stack[64 * 1024];

Region* region_of(const std::byte* address) noexcept {
  for (auto& region : regions)
    if (address >= region.begin && address < region.begin + region.bytes) return &region;
  return nullptr;
}

/// Maps the parameters anew. Safe in a signal handler.
bool map(const Region& region, int protection, int flags) noexcept {
  void* made = mmap(region.begin, region.bytes, protection, flags | MAP_FIXED, region.fd, region.offset);
  return made != MAP_FAILED && madvise(made, region.bytes, MADV_DONTFORK) == 0;
}

// Several threads of a model may write at once. One makes the pages the process's own; the others try again
// then.
void on_fault(int signal_number, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  const bool sent = info->si_code <= 0;  // A process sent the signal: no instruction has faulted.
  auto* const region = region_of(address);
  if (sent || region == nullptr) {
    signal(signal_number, SIG_DFL);  // The instruction faults again, now with the default action.
    if (sent) raise(signal_number);
    return;
  }
  int expected = shared;
  if (!region->pages.compare_exchange_strong(expected, changing)) {
    while (region->pages.load() == changing) sched_yield();
    return;
  }
  if (map(*region, PROT_READ | PROT_WRITE, MAP_PRIVATE)) return region->pages.store(own);
  session::refuse_attempt(
      *guarded, guarded->session().word().attempt, session::Reason::exception,
      "the model wrote into its parameters, and there is no memory for a copy of its own");
  _exit(exit_failed);
}

float as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
struct Bfloat16 {
  std::uint16_t bits;
  explicit operator double() const { return as_float(std::uint32_t{bits} << 16); }
};
struct Float16 {
  std::uint16_t bits;
  explicit operator double() const {
    const double sign = (bits & 0x8000u) != 0 ? -1 : 1, fraction = bits & 0x3ffu;
    const int exponent = bits >> 10 & 0x1f;
    if (exponent == 0x1f) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
    return exponent == 0 ? sign * std::ldexp(fraction, -24)
                         : sign * std::ldexp(fraction + 1024, exponent - 25);
  }
};

/// Whether the elements differ by more than rounding.
template <class T>
bool moved(const std::byte* now, const std::byte* before, std::uint64_t count,
           double rounding = most_rounding) {
  const auto* one = reinterpret_cast<const T*>(now);
  const auto* other = reinterpret_cast<const T*>(before);
  double largest = 0, difference = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto here = double(one[i]), there = double(other[i]);
    if (std::isnan(here) != std::isnan(there)) return true;
    if (here == there || std::isnan(here)) continue;  // Also two infinities.
    difference = std::max(difference, std::abs(here - there));
  }
  if (difference == 0) return false;
  for (std::uint64_t i = 0; i < count; ++i)
    if (std::isfinite(double(other[i]))) largest = std::max(largest, std::abs(double(other[i])));
  return difference > rounding * largest;
}

bool moved(const session::TensorEntry& tensor, const std::byte* now, const std::byte* before) {
  const auto count = tensor.elements();
  if (tensor.group == session::Group::frozen || !session::element_of(tensor.dtype))
    return std::memcmp(now, before, tensor.bytes()) != 0;
  switch (*session::element_of(tensor.dtype)) {
    case session::Element::f64:
      return moved<double>(now, before, count);
    case session::Element::bf16:
      return moved<Bfloat16>(now, before, count, most_bfloat16_rounding);
    case session::Element::f16:
      return moved<Float16>(now, before, count, most_float16_rounding);
    case session::Element::f32:
      break;
  }
  return moved<float>(now, before, count);
}

/// Makes the pages of the region the shared ones again.
void restore(Region& region) {
  if (region.pages.load() == shared) return;
  if (!map(region, PROT_READ, MAP_SHARED)) throw SystemError("mapping the parameters again", errno);
  region.pages.store(shared);
  ipc::populate_read(region.begin, region.bytes);
}

}  // namespace

WriteGuard::WriteGuard(const session::RunnerView& runner, const session::Manifest& manifest)
    : manifest_(manifest) {
  const auto& session = runner.session();
  guarded = &runner;
  auto& region = regions[0];
  region.begin = runner.parameters();
  region.bytes = ipc::whole_pages(session.header().bytes.parameters);
  region.fd = session.fds().front();
  region.offset = static_cast<off_t>(session.parameters_offset());
  const stack_t stack{.ss_sp = handler_stack, .ss_flags = 0, .ss_size = sizeof handler_stack};
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void WriteGuard::add(std::byte* begin, int fd) {
  auto& region = regions[1];
  region.begin = begin;
  region.fd = fd;
  region.bytes = regions[0].bytes;
}

void WriteGuard::begin() {
  for (auto& region : regions) restore(region);
}

std::string WriteGuard::check() {
  std::string name;
  for (auto& region : regions) {
    if (region.pages.load() == shared) continue;
    const ipc::Mapping before(region.fd, static_cast<std::uint64_t>(region.offset), region.bytes,
                              ipc::Access::read);
    for (const auto& tensor : manifest_.tensors)
      if (name.empty() && moved(tensor, region.begin + tensor.offset, before.data() + tensor.offset))
        name = tensor.name;
    restore(region);
  }
  return name;
}

}  // namespace accelmgr::runner
