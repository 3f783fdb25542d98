#include "libtorch/tensor/torch_version.hpp"

#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include "accelmgr/errors.hpp"

namespace accelmgr::tensor {

std::string torch_version_of(std::string_view show_config) {
  constexpr std::string_view key = "TORCH_VERSION=";
  const auto at = show_config.find(key);
  if (at == std::string_view::npos) return "unknown";
  const auto rest = show_config.substr(at + key.size());
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789.")));
}

void check_torch_version() {
  const auto built = fmt::format("{}.{}.{}", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH);
  const auto loaded = torch_version_of(at::show_config());
  if (loaded != built)
    throw UsageError(fmt::format(
        "accelmgr was built against torch {}, but the libtorch loaded here is {}; install torch {} "
        "or build accelmgr again",
        built, loaded, built));
}

}  // namespace accelmgr::tensor
