// Tests of what a runner is given at its start.
#include "engine/runner/rank_setup.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

namespace accelmgr::runner {
namespace {

TEST(RankSetup, ShowsTheOwnGpuAlone) {
  Config config;
  config.nprocs = 2;
  config.runners.device = Device::cuda;
  config.runners.devices = {"GPU-1", "cpu"};
  EXPECT_EQ(config_of_rank(config, 0).runners.device, Device::cuda);
  EXPECT_EQ(config_of_rank(config, 1).runners.device, Device::cpu);
  EXPECT_FALSE(config_of_rank(config, 0).runners.protect_parameters) << "a driver could not register them";
  EXPECT_TRUE(config_of_rank(config, 1).runners.protect_parameters);
  setenv("CUDA_VISIBLE_DEVICES", "3", 1);
  set_environment_of_rank(Config{}, 0);
  EXPECT_STREQ(getenv("CUDA_VISIBLE_DEVICES"), "3") << "the CPU's runners leave it as it is";
  set_environment_of_rank(config, 0);
  EXPECT_STREQ(getenv("CUDA_VISIBLE_DEVICES"), "GPU-1");
  set_environment_of_rank(config, 1);
  EXPECT_STREQ(getenv("CUDA_VISIBLE_DEVICES"), "");
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(RankSetup, MakesCublasDeterministicWhereThatIsWanted) {
  const char* const name = "CUBLAS_WORKSPACE_CONFIG";
  Config config;
  unsetenv(name);
  set_environment_of_rank(config, 0);
  EXPECT_EQ(getenv(name), nullptr) << "it computes on the CPU";
  config.runners.device = Device::cuda;
  config.deterministic = false;
  set_environment_of_rank(config, 0);
  EXPECT_EQ(getenv(name), nullptr);
  config.deterministic = true;
  set_environment_of_rank(config, 0);
  EXPECT_STREQ(getenv(name), ":4096:8");
  setenv(name, ":16:8", 1);
  set_environment_of_rank(config, 0);
  EXPECT_STREQ(getenv(name), ":16:8") << "the user's stays";
  unsetenv(name);
}

}  // namespace
}  // namespace accelmgr::runner
