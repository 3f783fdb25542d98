#include "shipped_configuration.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::program {

std::string shipped_configuration() {
  namespace fs = std::filesystem;
  std::error_code error;
  const auto own = fs::read_symlink("/proc/self/exe", error);
  std::vector<fs::path> places{own.parent_path().parent_path() / "share/accelmgr/gpt-licenses.yaml"};
#ifdef ACCELMGR_SOURCE_CONFIGURATION
  places.push_back((own.parent_path() / ACCELMGR_SOURCE_CONFIGURATION).lexically_normal());
#endif
  for (const auto& place : places)
    if (fs::exists(place, error)) return place.string();
  throw ConfigError(
      fmt::format("train without --config needs the shipped configuration, which is not at {}; name a file: "
                  "accelmgr train --config FILE (in a checkout: --config configs/gpt-licenses.yaml)",
                  places.front().string()));
}

}  // namespace accelmgr::program
