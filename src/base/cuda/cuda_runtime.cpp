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
#define FIND(result, member, function, parameters) library.find(#function, runtime.member);
  ACCELMGR_CUDA_RUNTIME(FIND)
#undef FIND
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
