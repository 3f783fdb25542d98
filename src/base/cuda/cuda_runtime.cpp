#include "base/cuda/cuda_runtime.hpp"

#include <cstdlib>

#include "base/cuda/shared_library.hpp"

namespace accelmgr::device {
namespace {

namespace fs = std::filesystem;

/// A version of the runtime: the name of its library, and its folder in torch's wheels.
struct Version {
  const char* library;
  const char* wheel;
};
constexpr Version versions[] = {{"libcudart.so.13", "nvidia/cu13/lib"},
                                {"libcudart.so.12", "nvidia/cuda_runtime/lib"}};
constexpr const char* libraries[] = {versions[0].library, versions[1].library};

Runtime functions_of(SharedLibrary library) {
  Runtime runtime{};
  const auto find = [&](const char* name, auto& function) { library.find(name, function); };
  find("cudaSetDevice", runtime.set_device);
  find("cudaDeviceGetPCIBusId", runtime.pci_bus_id);
  find("cudaStreamCreateWithFlags", runtime.stream_create);
  find("cudaStreamDestroy", runtime.stream_destroy);
  find("cudaStreamWaitEvent", runtime.stream_wait_event);
  find("cudaEventCreateWithFlags", runtime.event_create);
  find("cudaEventDestroy", runtime.event_destroy);
  find("cudaEventRecord", runtime.event_record);
  find("cudaEventRecordWithFlags", runtime.event_record_with_flags);
  find("cudaEventQuery", runtime.event_query);
  find("cudaMemcpyAsync", runtime.copy);
  find("cudaMemsetAsync", runtime.fill);
  find("cudaHostRegister", runtime.host_register);
  find("cudaHostUnregister", runtime.host_unregister);
  find("cudaHostAlloc", runtime.host_allocate);
  find("cudaFreeHost", runtime.host_free);
  find("cudaMalloc", runtime.allocate);
  find("cudaFree", runtime.free);
  find("cudaGetLastError", runtime.last_error);
  find("cudaGetErrorName", runtime.error_name);
  find("cudaGetErrorString", runtime.error_text);
  library.check("CUDA's runtime library", "it comes with the CUDA toolkit, and with torch's wheels for CUDA");
  return runtime;
}

}  // namespace

std::vector<std::string> cuda_runtime_candidates(const std::vector<fs::path>& site_packages) {
  std::vector<fs::path> folders;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const char* folder = std::getenv(variable); folder != nullptr && *folder != '\0')
      folders.push_back(fs::path(folder) / "lib64");
  folders.emplace_back();  // A name without a folder: the dynamic linker looks in its own.
  folders.emplace_back("/usr/local/cuda/lib64");

  std::vector<std::string> candidates;
  for (const auto& site : site_packages)
    for (const auto& [library, wheel] : versions) candidates.push_back((site / wheel / library).string());
  for (const auto& folder : folders)
    for (const auto& version : versions) candidates.push_back((folder / version.library).string());
  return candidates;
}

Runtime load_cuda_runtime_at(const std::string& path) { return functions_of(SharedLibrary({}, {path})); }

Runtime load_cuda_runtime(const std::vector<std::string>& candidates) {
  return functions_of(SharedLibrary(libraries, candidates));
}

}  // namespace accelmgr::device
