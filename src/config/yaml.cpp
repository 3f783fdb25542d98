#include "config/yaml.hpp"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>

#include "accelmgr/errors.hpp"
#include "config/table.hpp"

namespace accelmgr::config {
namespace {

// Walks the tree of a document. It descends into known sections only, so a document that contains itself
// ends, too.
class Reader {
 public:
  explicit Reader(std::string name) : name_(std::move(name)) {}

  std::vector<Assignment> read(const YAML::Node& root) {
    if (root.IsMap())
      read_section("", root);
    else if (root.IsDefined() && !root.IsNull())
      fail(root, "", "a configuration is a map of keys and values (nprocs: 2)");
    return std::move(values_);
  }

 private:
  void read_section(const std::string& section, const YAML::Node& map) {
    for (const auto& entry : map) {
      if (!entry.first.IsScalar()) fail(entry.first, section, "a key must be a name");
      const auto& name = entry.first.Scalar();
      read_entry(section.empty() ? name : section + "." + name, entry.first, entry.second);
    }
  }

  void read_entry(const std::string& key, const YAML::Node& name, const YAML::Node& value) {
    const auto [first, is_new] = lines_.emplace(key, name.Mark().line + 1);
    if (!is_new)
      fail(name, key,
           fmt::format("{} stands here a second time; the first is in line {}", key, first->second));
    const auto* option = find_option(key);
    if (option != nullptr && !is_section(key)) {
      values_.push_back({option, key, raw(key, name, value), place(name), "file " + place(name)});
    } else if (!is_section(key)) {
      fail(name, key, unknown_key(key));
    } else if (value.IsMap()) {
      read_section(key, value);
    } else if (!value.IsNull()) {  // A section whose lines are all commented out is null.
      fail(name, key, fmt::format("{} is a section with keys of its own below it, no value", key));
    }
  }

  RawValue raw(const std::string& key, const YAML::Node& name, const YAML::Node& value) const {
    if (value.IsSequence()) {
      RawValue list{RawValue::Form::list, {}};
      for (const auto& item : value) list.items.push_back(word(key, item, item).items.front());
      return list;
    }
    return word(key, name, value);
  }

  RawValue word(const std::string& key, const YAML::Node& place, const YAML::Node& value) const {
    if (value.IsNull()) fail(place, key, fmt::format("{} has no value (an empty text is written \"\")", key));
    if (!value.IsScalar()) fail(place, key, fmt::format("{} must be a single value", key));
    const bool quoted = value.Tag() == "!";
    return {quoted ? RawValue::Form::quoted : RawValue::Form::plain, {value.Scalar()}};
  }

  [[noreturn]] void fail(const YAML::Node& at, const std::string& key, const std::string& what) const {
    throw ConfigError(fmt::format("{}: {}", place(at), what), key);
  }

  std::string place(const YAML::Node& node) const {
    return fmt::format("{}:{}", name_, node.Mark().line + 1);
  }

  std::string name_;
  std::map<std::string, int> lines_;
  std::vector<Assignment> values_;
};

}  // namespace

std::vector<Assignment> parse_yaml(const std::string& text, const std::string& name) {
  try {
    const auto documents = YAML::LoadAll(text);
    if (documents.size() > 1)
      throw ConfigError(fmt::format("{}: {} documents; a configuration is one", name, documents.size()));
    return documents.empty() ? std::vector<Assignment>() : Reader(name).read(documents.front());
  } catch (const YAML::Exception& error) {
    throw ConfigError(fmt::format("{}:{}: no valid YAML: {}", name, error.mark.line + 1, error.msg));
  }
}

std::vector<Assignment> read_yaml(const std::string& file) {
  const auto fail = [&](const char* why) {
    throw ConfigError(fmt::format("{}: cannot be read: {}", file, why));
  };
  std::error_code not_there;  // Said better by opening it.
  if (std::filesystem::is_directory(file, not_there)) fail("it is a directory");
  std::ifstream stream(file, std::ios::binary);
  if (!stream) fail(strerrordesc_np(errno));
  std::ostringstream text;
  if (stream.peek() != std::ifstream::traits_type::eof() && !(text << stream.rdbuf()))
    fail("reading it failed");
  return parse_yaml(text.str(), file);
}

}  // namespace accelmgr::config
