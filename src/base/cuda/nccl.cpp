#include "base/cuda/nccl.hpp"

#include <fmt/format.h>

#include "accelmgr/errors.hpp"
#include "base/cuda/shared_library.hpp"

namespace accelmgr::device {
namespace {

constexpr const char* library_name = "libnccl.so.2";
constexpr int oldest_version = 21400;  // The first one with communicators that do not block.

Nccl nccl_functions_of(SharedLibrary library) {
  Nccl nccl{};
#define FIND(result, member, function, parameters) library.find(#function, nccl.member);
  ACCELMGR_NCCL(FIND)
#undef FIND
  library.check("NCCL", "it comes with torch's wheels for CUDA, in nvidia-nccl, and as libnccl2 of systems");
  int version = 0;
  if (const auto failed = nccl.get_version(&version); failed != nccl_code::success)
    throw UsageError(fmt::format("NCCL cannot be used: ncclGetVersion: {}", nccl.error_text(failed)));
  if (version < oldest_version)
    throw UsageError(fmt::format("NCCL cannot be used: its version is {}, and {} is the oldest that will do",
                                 version, oldest_version));
  return nccl;
}

}  // namespace

std::vector<std::string> nccl_candidates(const std::vector<std::filesystem::path>& site_packages) {
  std::vector<std::string> candidates;
  candidates.reserve(site_packages.size() + 1);
  for (const auto& site : site_packages)
    candidates.push_back((site / "nvidia/nccl/lib" / library_name).string());
  candidates.emplace_back(library_name);
  return candidates;
}

Nccl load_nccl(const std::vector<std::string>& candidates) {
  return nccl_functions_of(SharedLibrary({&library_name, 1}, candidates));
}

Nccl load_nccl_at(const std::string& path) { return nccl_functions_of(SharedLibrary({}, {path})); }

}  // namespace accelmgr::device
