// A file of YAML that lasts as long as a test, and the text of the error that a call ends with.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "config/loader.hpp"

namespace accelmgr::config {

class YamlFile {
 public:
  explicit YamlFile(const std::string& text) {
    std::string folder = (std::filesystem::temp_directory_path() / "accelmgr_config_XXXXXX").string();
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp " + folder);
    folder_ = folder;
    std::ofstream(path(), std::ios::binary) << text;
  }
  ~YamlFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  YamlFile(const YamlFile&) = delete;
  YamlFile& operator=(const YamlFile&) = delete;

  std::string path() const { return folder_ / "run.yaml"; }

 private:
  std::filesystem::path folder_;
};

/// Of `--set`.
struct Sets : std::vector<Setting> {
  Sets() = default;
  Sets(std::initializer_list<std::string> assignments) {
    for (const auto& assignment : assignments) push_back({assignment});
  }
};
using Environment = std::map<std::string, std::string>;

inline LoadedConfig load_text(const std::string& yaml, const Sets& sets = {},
                              const Environment& environment = {}) {
  const YamlFile file(yaml);
  return load_config(file.path(), sets, environment);
}

/// The text and the key of the ConfigError that `call` throws; a failed test if it throws none.
struct Refusal {
  std::string text;
  std::string key;
};

template <class Call>
Refusal refusal(Call&& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return {error.what(), error.key()};
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

inline ::testing::AssertionResult says(const Refusal& refusal, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    if (refusal.text.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "no '" << part << "' in: " << refusal.text;
  return ::testing::AssertionSuccess();
}

}  // namespace accelmgr::config
