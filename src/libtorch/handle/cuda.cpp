#include "libtorch/handle/cuda.hpp"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "accelmgr/errors.hpp"
#include "base/cuda/cuda_runtime.hpp"

namespace accelmgr::libtorch {
namespace {

[[noreturn]] void refuse_cuda(const std::string& why) {
  throw ConfigError("runners.device is cuda, but " + why, "runners.device");
}

/// The folder of the libtorch that this process has loaded.
std::filesystem::path torch_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) == 0 || info.dli_fname == nullptr)
    refuse_cuda("the folder of libtorch_cpu.so is not known");
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

void load_cuda() {
  const auto library = torch_folder() / "libtorch_cuda.so";
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
    refuse_cuda(
        fmt::format("libtorch's part for CUDA cannot be loaded ({}); torch's wheels for CUDA have it, "
                    "those for the CPU have not",
                    dlerror()));
  if (!at::Context::hasCUDART()) refuse_cuda("torch was asked for GPUs before its part for CUDA was loaded");
  if (!at::Context::hasCUDA())
    refuse_cuda(
        "torch finds no GPU: there is none, its driver is missing or too old, or CUDA_VISIBLE_DEVICES "
        "hides it; use runners.device cpu");
  at::globalContext().lazyInitDevice(at::kCUDA);
}

device::Runtime cuda_runtime() {
  try {
    // libtorch_cpu.so of the wheels for CUDA brings the runtime itself.
    return device::load_cuda_runtime(
        device::cuda_runtime_candidates({torch_folder().parent_path().parent_path()}));
  } catch (const UsageError& error) {
    refuse_cuda(error.what());
  }
}

device::Nccl nccl() {
  return device::load_nccl(device::nccl_candidates({torch_folder().parent_path().parent_path()}));
}

}  // namespace accelmgr::libtorch
