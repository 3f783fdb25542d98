// Steps that the service makes for a host or a client that does not wait for them. They go on when that
// process ends, and the service keeps their results.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/step_result.hpp"
#include "engine/service/local_driver.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::service {

/// What one call of step() of the service is to do.
struct StepsAsked {
  int count = 1;
  StepOptions options{};
  double timeout_s = 0;
  std::optional<session::Update> update{};  ///< Of inner steps.
};

/// Makes the steps; ends early if one fails, or if `made`, which gets each result, returns false.
void make_steps(const StepsAsked& asked, Drive& drive, const std::function<bool(StepResult)>& made);

/// Used by the thread of the loop, but for what is marked.
class PendingSteps {
 public:
  static constexpr int most = 100'000;
  static constexpr std::size_t most_told = 1000;  ///< By one answer.

  explicit PendingSteps(LocalDriver& driver) : driver_(driver) {}

  /// Begins the steps. `who` names the process that asked for them. Throws as LocalDriver::run() does.
  /// Requires: the driver is not busy.
  void begin(const StepsAsked& asked, const std::string& who);
  /// Ends them before the next step. `over` is called when they are over, at once if they are.
  void cancel(std::function<void()> over);
  bool are_under_way() const noexcept { return under_way_; }
  /// How many steps begin() was asked for, if no other step was made since; else 0. `steps`: how many steps
  /// the session has committed.
  int count(std::uint64_t steps) const;
  /// How far the steps are, as a clause: "the service makes 5 steps that ...".
  std::string text() const;
  /// The state of the steps, with the results after the first `known`. Any thread.
  nlohmann::json since(std::size_t known) const;

 private:
  void end(const std::exception_ptr& thrown);

  LocalDriver& driver_;
  std::string who_;
  std::atomic<bool> under_way_ = false, is_cancelled_ = false;
  std::vector<std::function<void()>> when_over_;
  mutable std::mutex mutex_;
  // Guarded by the mutex.
  int count_ = 0;
  std::vector<StepResult> made_;
  std::string error_;
};

}  // namespace accelmgr::service
