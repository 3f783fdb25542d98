// The handler of base::fault_point(). A program that links this file has it installed before main().
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/fault_point.hpp"
#include "base/log.hpp"
#include "engine/faults/plan.hpp"

namespace accelmgr::faults {
namespace {

std::atomic<Plan*> plan_of_this_process{nullptr};

void arm(const std::vector<std::string>& texts, int rank, std::uint32_t generation) {
  std::vector<Fault> faults;
  for (const auto& text : texts) faults.push_back(parse(text));
  auto plan = std::make_unique<Plan>(std::move(faults), rank, generation);
  if (plan->empty()) plan.reset();
  delete plan_of_this_process.exchange(plan.release());
}

[[noreturn]] void hang() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (;;) pause();
}

base::FaultEffect act(const Fault& fault) {
  base::log().info("injecting a fault: {}", fault.text);
  switch (fault.action) {
    case Action::kill:
      raise(SIGKILL);
      break;
    case Action::stop:
      raise(SIGSTOP);
      break;
    case Action::exit:
      _exit(fault.exit_code);
    case Action::exception:
      throw std::runtime_error(fault.message);
    case Action::hang:
      hang();
    case Action::nan:
      return base::FaultEffect::nan;
    case Action::slow:
      std::this_thread::sleep_for(fault.delay);
      break;
  }
  return base::FaultEffect::none;
}

base::FaultEffect reach(base::FaultPhase phase) {
  auto* plan = plan_of_this_process.load(std::memory_order_acquire);
  if (plan == nullptr) [[likely]]
    return base::FaultEffect::none;
  auto effect = base::FaultEffect::none;
  for (const auto* fault : plan->reach(phase, base::log_step()))
    if (act(*fault) == base::FaultEffect::nan) effect = base::FaultEffect::nan;
  return effect;
}

constexpr base::FaultHandler handler{.arm = arm, .reach = reach};
[[maybe_unused]] const bool installed = (base::fault_handler.store(&handler), true);

}  // namespace
}  // namespace accelmgr::faults
