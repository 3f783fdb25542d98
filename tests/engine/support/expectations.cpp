#include "engine/support/expectations.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>

#include <filesystem>

namespace accelmgr::test {

std::string left_behind() {
  const auto deadline = soon();
  pid_t reaped = 0;
  while (reaped != -1 && !deadline.passed()) {
    reaped = waitpid(-1, nullptr, WNOHANG);
    if (reaped == 0) sched_yield();  // A child may still be ending.
  }
  if (reaped != -1) return "a process is left";
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    if (entry.path().string().find("accelmgr") != std::string::npos) return entry.path();
  return {};
}

void expect_nothing_left() { EXPECT_EQ(left_behind(), ""); }

void expect_failed(const StepResult& result, StepStatus status, std::initializer_list<std::string> parts) {
  EXPECT_STREQ(to_string(result.status), to_string(status)) << result.error;
  EXPECT_FALSE(result);
  EXPECT_FALSE(result.counted);
  EXPECT_EQ(result.samples, 0u);
  EXPECT_EQ(result.loss, 0);
  expect_contains(result.error, parts);
}

void expect_contains(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

}  // namespace accelmgr::test
