// Shared by the tests of configurations: a temporary YAML file, and the error that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::config {

class YamlFile {
 public:
  explicit YamlFile(const std::string& text) : path_(folder_.write("run.yaml", text)) {}
  const std::string& path() const { return path_; }

 private:
  test::TemporaryFolder folder_;
  std::string path_;
};

/// Settings as `--set` gives them.
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

/// The text and the key of a ConfigError. refusal() returns those of the error that `call` throws; the test
/// fails if there is none.
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
