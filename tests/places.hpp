// Where files of the build and of the checkout are. No path is compiled in: the compiler cache of one clone
// then serves another one.
#pragma once

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace accelmgr::test {

/// The folder of the build that this program is of: the nearest one above it that has a CMakeCache.txt.
inline std::filesystem::path build_folder() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  for (auto folder = program.parent_path(); folder != folder.root_path(); folder = folder.parent_path())
    if (std::filesystem::exists(folder / "CMakeCache.txt")) return folder;
  throw std::runtime_error(program.string() + " is in no build folder of CMake");
}

/// `path` of the build, as tests/engine/support/fake_driver.
inline std::string built(const std::string& path) { return build_folder() / path; }

/// `path` of the checkout, as configs/gpt-licenses.yaml. CMake's cache says where the checkout is.
inline std::string in_checkout(const std::string& path) {
  std::ifstream cache(build_folder() / "CMakeCache.txt");
  const std::string key = "CMAKE_HOME_DIRECTORY:INTERNAL=";
  for (std::string line; std::getline(cache, line);)
    if (line.starts_with(key)) return std::filesystem::path(line.substr(key.size())) / path;
  throw std::runtime_error(build_folder().string() + "/CMakeCache.txt has no " + key);
}

}  // namespace accelmgr::test
