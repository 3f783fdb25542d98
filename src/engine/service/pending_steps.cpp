#include "engine/service/pending_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/exception_text.hpp"
#include "engine/client/left_gradients.hpp"
#include "engine/service/status.hpp"

namespace accelmgr::service {

using nlohmann::json;

void make_steps(const StepsAsked& asked, Drive& drive, const std::function<bool(StepResult)>& made) {
  const auto& session = drive.session;
  auto options = asked.options;
  // What a host has applied is not added again.
  if (client::left_in(session) == LeftGradients::applied) options.accumulate = false;
  for (int i = 0; i < asked.count; ++i) {
    auto result = drive.stepper.step(options, asked.timeout_s, client::StepKind::outer,
                                     asked.update ? &*asked.update : nullptr);
    const bool is_ok = bool(result);
    if (!made(std::move(result)) || !is_ok) return;
    options = asked.options;
  }
}

void PendingSteps::begin(const StepsAsked& asked, const std::string& who) {
  is_cancelled_ = false;
  driver_.run(
      [this, asked](Drive& drive) {
        make_steps(asked, drive, [this](StepResult result) {
          const std::lock_guard lock(mutex_);
          made_.push_back(std::move(result));
          return !is_cancelled_;
        });
      },
      [this](const std::exception_ptr& thrown) { end(thrown); });
  who_ = who;
  under_way_ = true;
  const std::lock_guard lock(mutex_);
  count_ = asked.count;
  made_.clear();
  error_.clear();
}

void PendingSteps::end(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = base::current_exception_text();
  }
  under_way_ = false;
  for (const auto& over : std::exchange(when_over_, {})) over();
}

void PendingSteps::cancel(std::function<void()> over) {
  is_cancelled_ = true;
  if (!under_way_) return over();
  when_over_.push_back(std::move(over));
}

int PendingSteps::count(std::uint64_t steps) const {
  const std::lock_guard lock(mutex_);
  const bool others_since = !under_way_ && (made_.empty() || made_.back().step != steps);
  return others_since ? 0 : count_;
}

std::string PendingSteps::text() const {
  const std::lock_guard lock(mutex_);
  return fmt::format("the service is making {} steps that {} began; {} are done", count_, who_, made_.size());
}

json PendingSteps::since(std::size_t known) const {
  const std::lock_guard lock(mutex_);
  json steps = json::array();
  const auto end = std::min(made_.size(), known + most_told);
  for (auto i = known; i < end; ++i) steps.push_back(result_of(made_[i]));
  return {{"count", count_},
          {"made", made_.size()},
          {"under_way", under_way_.load()},
          {"error", error_.empty() ? json() : json(error_)},
          {"steps", steps}};
}

}  // namespace accelmgr::service
