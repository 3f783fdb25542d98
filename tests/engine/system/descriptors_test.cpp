// Checks that what user code executes, in a host, a manager or a runner, inherits no descriptor of ours: one
// that it kept open would hold a lock, a port or a connection after our end.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>

#include "base/config/start_method.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/zygote.hpp"
#include "descriptors.hpp"
#include "staged_run.hpp"

namespace accelmgr::test {
namespace {

class ExecutedChild : public testing::TestWithParam<StartMethod> {
 protected:
  ~ExecutedChild() override { ipc::end_zygote(); }
};

/// What a program that this process executes now has open.
Descriptors of_program() {
  const auto pid = execute_sleep("120", environ);
  auto found = inherited_by(pid);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return found;
}

TEST_P(ExecutedChild, HasNoDescriptorOfOurs) {
  const auto expected = of_program();  // What started this test may have left some open.
  Stage stage;
  auto config = staged_config(stage);
  config.data.options["execute_at"] = "0";
  stage.tell_once(1, Act::execute_child);
  client::Handle manager(config, {.method = GetParam()});
  expect_ok(manager);
  EXPECT_EQ(of_program(), expected) << "of the host";
  const auto of_manager = inherited_by(stage.child_of_source());
  const auto of_runner = inherited_by(stage.child_of_model());
  const auto given = GetParam() == StartMethod::fork ? expected : standard_streams(expected);
  EXPECT_EQ(of_manager, given);
  EXPECT_EQ(of_runner, given);
}

INSTANTIATE_TEST_SUITE_P(All, ExecutedChild,
                         testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver),
                         [](const auto& method) { return config::name_of(method.param); });

}  // namespace
}  // namespace accelmgr::test
