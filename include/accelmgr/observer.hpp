// A handle for those who watch the session of a service: it reads, and changes nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/named_tensor.hpp"
#include "accelmgr/statistics.hpp"
#include "accelmgr/step_result.hpp"

namespace accelmgr {

/// Copies of all parameters at one time.
struct ParameterCopy {
  std::uint64_t version = 0;           ///< Grows when parameters are written.
  std::uint64_t step = 0;              ///< How many steps were committed then.
  std::vector<NamedTensor> tensors{};  ///< As Manager::parameters() lists them. They share one memory.
};

/// Any number of processes may observe a service (`accelmgr serve`), besides the one host that drives it, and
/// while hosts come and go. The service hands out its memory for reading only: the kernel refuses to map it
/// writable. The service does not know its observers, and nothing waits for them. An observer that is stopped
/// or killed changes no step. One that copies large parameters uses memory bandwidth, as any process does.
///
/// Not guarded against: a process of the service's user, or a privileged one, that opens the memory for
/// writing by way of /proc, or traces a process that may write.
///
/// Gradients are not there for observers. Runners and host write them in place, and no word of the session
/// says when the host zeroes or clips them: a copy could be torn.
///
/// Needs no init(). Thread safety: one thread at a time; a forked child may use its copy of the object.
class Observer {
 public:
  /// Observes a service; `service` is as for Manager::attach(). Blocks for at most `timeout_s`. Throws
  /// ConfigError (neither a name nor a path), SessionError: there is no service, or it is of another build.
  static Observer attach(const std::string& service, double timeout_s = 10);

  Observer(Observer&&) noexcept;
  Observer& operator=(Observer&&) noexcept;
  ~Observer();

  /// Whether the service's process has ended. What it last left can still be read.
  bool has_ended() const noexcept;
  /// Counts, and the team. `manager_pid` is the service's.
  Statistics statistics() const;
  /// The last call of step() of any host; empty if there was none. Has `status`, `counted`, `step`,
  /// `attempt`, `loss`, `samples`, `participants`, `tries` and the times; other fields have their defaults.
  std::optional<StepResult> last_step() const;
  /// The next call of step() after the one returned last, or the first one since attach(); with the fields of
  /// last_step(). Waits at most `timeout_s`; empty if there was no call. It comes up to 20 ms after the step.
  /// The session has the last 256 calls: older ones are left out. Throws SessionError when the service has
  /// ended and all were returned.
  std::optional<StepResult> next_step(double timeout_s);
  /// The copy is never half written: it is taken during an attempt, or while no host drives the session, and
  /// taken again if that changed meanwhile. At other times a host may be writing. Throws SessionError: there
  /// was no such time within `timeout_s`, or the service has ended. Parameters that a dead host left half
  /// written are copied as they are; Manager::unfinished() of the next host says so.
  ParameterCopy parameters(double timeout_s = 10) const;

 private:
  struct State;
  explicit Observer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace accelmgr
