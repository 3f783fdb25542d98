// Checks that a launcher's variables are not taken for configuration, so a launched process can load one.
#include "launcher/launch/plan/variables.hpp"

#include <algorithm>

#include "base/config/loader.hpp"
#include "launcher/launch/nodes.hpp"
#include "launcher/launch/plan/child_environment.hpp"

namespace accelmgr::launch {
namespace {

TEST(LaunchVariables, AreNoConfiguration) {
  for (const auto& name : launch_variables())
    EXPECT_EQ(config::load_config("", {}, {{name, "1"}}).config, Config{}) << name;
}

TEST(LaunchVariables, AreAllThatAChildGetsAnew) {
  const auto node_info = gpu_node(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}});
  const auto spec = resolve({.workers = "a:0;10.0.0.1:7"}, node_info);
  for (const auto& [name, value] : child_environment(spec, 0, node_info)) {
    const bool listed = std::ranges::find(launch_variables(), name) != launch_variables().end();
    EXPECT_TRUE(listed || name == "CUDA_VISIBLE_DEVICES" || name == variable::omp_num_threads) << name;
  }
}

TEST(LaunchVariables, LetAChildLoadAConfiguration) {
  const auto node_info =
      gpu_node(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}, {"ACCELMGR_LAUNCH__BACKEND", "gloo"}});
  const auto child = child_environment(resolve({.workers = "a:0;10.0.0.1:7"}, node_info), 1, node_info);
  EXPECT_EQ(config::load_config("", {}, child).config.launch.backend, "gloo");
}

}  // namespace
}  // namespace accelmgr::launch
