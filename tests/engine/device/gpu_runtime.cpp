// accelmgr_gpu_tests: the tests of the transport on a GPU of this machine. Without a GPU they fail.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "base/cuda/cuda_runtime.hpp"
#include "tested_runtime.hpp"

namespace accelmgr::test {
namespace {

/// A symbol of a library that this process has loaded, or null.
void* loaded(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : dlsym(handle, name);
}

/// A function of CUDA's runtime that the transport does not call.
template <class Function>
Function* more(const char* name) {
  for (const char* library : {"libcudart.so.13", "libcudart.so.12"})
    if (void* function = loaded(library, name)) return reinterpret_cast<Function*>(function);
  throw std::runtime_error(std::string("CUDA's runtime library has no ") + name);
}

/// Calls such a function.
template <class... Arguments>
void succeed(const char* name, Arguments... arguments) {
  if (const auto code = more<device::Code(Arguments...)>(name)(arguments...))
    throw std::runtime_error(std::string(name) + " reports " + std::to_string(code));
}

/// Calls a function of the driver.
template <class... Arguments>
void drive(const char* name, Arguments... arguments) {
  void* function = loaded("libcuda.so.1", name);
  if (function == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
  if (const auto code = reinterpret_cast<device::Code (*)(Arguments...)>(function)(arguments...))
    throw std::runtime_error(std::string(name) + " reports " + std::to_string(code));
}

bool is_fake() { return loaded("libcudart.so.13", "accelmgr_fake_cuda") != nullptr; }

/// The driver compiles it.
constexpr const char* illegal_write = R"(
.version 6.3
.target sm_75
.address_size 64
.visible .entry illegal_write() {
  .reg .u64 %address;
  .reg .u32 %value;
  mov.u64 %address, 16;
  mov.u32 %value, 1;
  st.global.u32 [%address], %value;
  ret;
}
)";

class Gpu final : public TestedRuntime {
 public:
  Gpu() {
    calls = device::load_cuda_runtime(device::cuda_runtime_candidates({}));
    int count = 0;
    const auto code = more<device::Code(int*)>("cudaGetDeviceCount")(&count);
    if (code != device::code::success || count == 0)
      throw std::runtime_error(std::string("cudaGetDeviceCount: ") + calls.error_text(code));
    slow_copy_bytes = is_fake() ? std::size_t{4} << 20 : std::size_t{1} << 30;
  }
  void queue_illegal_write(device::StreamHandle stream) override {
    if (is_fake())
      return more<void(int, device::Code)>("fake_cuda_break_after")(0, device::code::illegal_address);
    void *module = nullptr, *kernel = nullptr;
    drive("cuModuleLoadData", &module, static_cast<const void*>(illegal_write));
    drive("cuModuleGetFunction", &kernel, module, "illegal_write");
    void** const no_parameters = nullptr;
    drive("cuLaunchKernel", kernel, 1U, 1U, 1U, 1U, 1U, 1U, 0U, stream, no_parameters, no_parameters);
  }
  std::function<void()> graph_of(device::StreamHandle stream, const std::function<void()>& body) override {
    void *graph = nullptr, *executable = nullptr;
    succeed("cudaStreamBeginCapture", stream, 1);  // cudaStreamCaptureModeThreadLocal
    body();
    succeed("cudaStreamEndCapture", stream, &graph);
    succeed("cudaGraphInstantiate", &executable, graph, 0ULL);
    return [executable, stream] { succeed("cudaGraphLaunch", executable, stream); };
  }
};

}  // namespace

std::vector<RuntimeKind> tested_runtimes() {
  return {{"Gpu", []() -> std::unique_ptr<TestedRuntime> { return std::make_unique<Gpu>(); }}};
}

}  // namespace accelmgr::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  try {
    accelmgr::test::tested_runtimes().front().open();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelmgr_gpu_tests needs a GPU: %s\n", error.what());
    return 1;
  }
  return RUN_ALL_TESTS();
}
