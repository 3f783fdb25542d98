#include "libtorch/handle/cuda.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "accelmgr/errors.hpp"

namespace accelmgr::libtorch {
namespace {

bool has_cuda_library() { return dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD) != nullptr; }

TEST(Cuda, IsNotLoadedIntoProcessesThatComputeOnTheCpu) { EXPECT_FALSE(has_cuda_library()); }

// In a process of its own, which sees no GPU on any machine: torch remembers what it found.
TEST(Cuda, IsLoadedOnDemandAndAMissingGpuIsSaidInPlainWords) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto load = [] {
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    try {
      load_cuda();
    } catch (const ConfigError& error) {
      std::fprintf(stderr, "%s: %s", error.key().c_str(), error.what());
      _exit(has_cuda_library() ? 0 : 1);
    }
    _exit(2);
  };
  EXPECT_EXIT(load(), testing::ExitedWithCode(0),
              "^runners.device: runners.device is cuda, but torch finds no GPU: there is none, its driver");
}

}  // namespace
}  // namespace accelmgr::libtorch
