// Shared by the tests of configurations: a temporary YAML file, and the error that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "refusal.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::config {

using test::Refusal;
using test::refusal;
using test::says;

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

}  // namespace accelmgr::config
