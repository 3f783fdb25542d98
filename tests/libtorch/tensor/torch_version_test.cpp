#include "libtorch/tensor/torch_version.hpp"

#include <gtest/gtest.h>

namespace accelmgr::tensor {
namespace {

TEST(TorchVersion, IsReadFromWhatTheLibrarySaysOfItself) {
  EXPECT_EQ(torch_version_of(
                "PyTorch built with:\n  - GCC 13\n, CUDNN_VERSION=9.1, TORCH_VERSION=2.11.0, USE_CUDA=ON"),
            "2.11.0");
  EXPECT_EQ(torch_version_of("TORCH_VERSION=2.9.1"), "2.9.1");
  EXPECT_EQ(torch_version_of("PyTorch built with nothing"), "unknown");
}

TEST(TorchVersion, TheLibraryOfThisBuildIsAccepted) { EXPECT_NO_THROW(check_torch_version()); }

}  // namespace
}  // namespace accelmgr::tensor
