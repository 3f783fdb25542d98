// Expectations of tests of whole systems: how a step failed, and that the system left nothing behind.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "accelmgr/step_result.hpp"
#include "base/clock.hpp"

namespace accelmgr::test {

/// A deadline for any wait of these tests, long enough for a loaded machine. Only a failing test reaches it.
inline base::Deadline soon() { return base::Deadline::in_seconds(60); }

/// Waits until all children of this process have ended, and reaps them. Orphans are among them, because
/// main() makes this process their reaper. Returns a text if a process is still there at the deadline, or if
/// /dev/shm holds something of accelmgr; otherwise an empty string.
std::string left_behind();
/// Fails the test unless left_behind() is empty.
void expect_nothing_left();

/// Makes a step that must succeed. Reports a failure with its error.
template <class Manager>
StepResult expect_ok(Manager& manager, const StepOptions& options = {}) {
  auto result = manager.step(options);
  EXPECT_EQ(result.status, StepStatus::ok) << result.error;
  EXPECT_TRUE(result.counted);
  EXPECT_EQ(result.error, "");
  return result;
}

/// Expects a step that ended with `status`, was not counted, and has an error with all `parts`.
void expect_failed(const StepResult& result, StepStatus status, std::initializer_list<std::string> parts);

/// Expects that `text` contains all `parts`.
void expect_contains(const std::string& text, std::initializer_list<std::string> parts);

}  // namespace accelmgr::test
