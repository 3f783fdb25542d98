// What a launcher tells its processes is no configuration: a process that loads one is not disturbed.
#include "launch/variables.hpp"

#include <algorithm>

#include "config/loader.hpp"
#include "launch/environment.hpp"
#include "launch/machines.hpp"

namespace accelmgr::launch {
namespace {

TEST(LaunchVariables, AreNoConfiguration) {
  for (const auto& name : launch_variables())
    EXPECT_EQ(config::load_config("", {}, {{name, "1"}}).config, Config{}) << name;
}

TEST(LaunchVariables, AreAllThatAChildGetsAnew) {
  const auto machine = gpu_machine(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}});
  const auto plan = resolve({.workers = "a:0;10.0.0.1:7"}, machine);
  for (const auto& [name, value] : child_environment(plan, 0, machine)) {
    const bool listed = std::ranges::find(launch_variables(), name) != launch_variables().end();
    EXPECT_TRUE(listed || name == "CUDA_VISIBLE_DEVICES" || name == variable::omp_num_threads) << name;
  }
}

TEST(LaunchVariables, LetAChildLoadAConfiguration) {
  const auto machine =
      gpu_machine(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}, {"ACCELMGR_LAUNCH__BACKEND", "gloo"}});
  const auto child = child_environment(resolve({.workers = "a:0;10.0.0.1:7"}, machine), 1, machine);
  EXPECT_EQ(config::load_config("", {}, child).config.launch.backend, "gloo");
}

}  // namespace
}  // namespace accelmgr::launch
