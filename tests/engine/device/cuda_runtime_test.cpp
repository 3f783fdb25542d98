// Tests of loading CUDA's runtime, with stubs of it: no GPU and no CUDA is needed.
#include "base/cuda/cuda_runtime.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ranges>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "places.hpp"

namespace accelmgr::device {
namespace {

const std::string whole_cudart = test::built("tests/engine/device/libaccelmgr_whole_cudart.so");
const std::string broken_cudart = test::built("tests/engine/device/libaccelmgr_broken_cudart.so");

TEST(CudaRuntime, IsLookedForWithTorchAndWithTheToolkit) {
  setenv("CUDA_HOME", "/opt/cuda", 1);
  const auto candidates = cuda_runtime_candidates({"/venv/site-packages"});
  const auto place = [&](const std::string& path) {
    return std::ranges::find(candidates, path) - candidates.begin();
  };
  EXPECT_EQ(place("/venv/site-packages/nvidia/cu13/lib/libcudart.so.13"), 0);
  EXPECT_EQ(place("/venv/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12"), 1);
  EXPECT_EQ(place("/opt/cuda/lib64/libcudart.so.13"), 2);
  EXPECT_LT(place("libcudart.so.13"), place("/usr/local/cuda/lib64/libcudart.so.13"));
  EXPECT_LT(place("/usr/local/cuda/lib64/libcudart.so.12"), std::ssize(candidates));
  unsetenv("CUDA_HOME");
}

TEST(CudaRuntime, FillsTheTableFromTheFirstLibraryThatIsThere) {
  const auto runtime = load_cuda_runtime({"/nowhere/libcudart.so.13", whole_cudart, broken_cudart});
  EXPECT_EQ(runtime.set_device(3), 3);
  EXPECT_STREQ(runtime.error_name(2), "two");
  EXPECT_STREQ(runtime.error_text(2), "a text");
  EXPECT_EQ(runtime.event_query(nullptr), 0);
  EXPECT_EQ(runtime.copy(nullptr, nullptr, 0, Direction::to_host, nullptr), 0);
}

TEST(CudaRuntime, ThatIsIncompleteIsRefusedWithWhatIsMissing) {
  const auto text = test::message_of<UsageError>([] { load_cuda_runtime({broken_cudart}); });
  EXPECT_NE(text.find("it has no cudaEventQuery"), std::string::npos) << text;
  EXPECT_EQ(text.find("cudaMalloc"), std::string::npos) << text;
}

TEST(CudaRuntime, ThatIsNowhereIsRefusedWithAllPlaces) {
  const auto text = test::message_of<UsageError>([] {
    load_cuda_runtime({"/nowhere/a.so", "/nowhere/b.so"});
  });
  for (const char* part : {"/nowhere/a.so", "/nowhere/b.so", "the CUDA toolkit", "torch's wheels"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(CudaRuntime, OfAPathIsThatLibraryOrAnError) {
  EXPECT_EQ(load_cuda_runtime_at(whole_cudart).set_device(3), 3);
  EXPECT_THROW(load_cuda_runtime_at(broken_cudart), UsageError);
}

TEST(CudaRuntime, IsInNoProcessThatDoesNotAskForIt) {
  for (const char* library : {"libcudart.so.13", "libcudart.so.12", "libcuda.so.1"})
    EXPECT_EQ(dlopen(library, RTLD_NOW | RTLD_NOLOAD), nullptr) << library;
}

}  // namespace
}  // namespace accelmgr::device
