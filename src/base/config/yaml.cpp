#include "base/config/yaml.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/config/table.hpp"
#include "base/errno_text.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::config {
namespace {

constexpr std::size_t largest_file = 16 << 20;  // A larger file is a device, or no configuration.

/// Takes the events of a document and keeps none: the caller only wants to know whether there is a document.
struct Passed final : YAML::EventHandler {
  using Style = YAML::EmitterStyle::value;
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, Style) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, Style) override {}
  void OnMapEnd() override {}
};

/// The document in `text`, null if there is none; nullopt if there are several. YAML::LoadAll() would take
/// documents without end out of some texts ("&x a\n? "), until there is no memory.
std::optional<YAML::Node> only_document(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Passed passed;
  if (parser.HandleNextDocument(passed) && parser.HandleNextDocument(passed)) return std::nullopt;
  return YAML::Load(text);
}

/// Line and column, counted from 1, of the first tab in the indentation of the lines from 0 to `last_line`.
std::optional<std::pair<int, std::size_t>> tab_in_indentation(const std::string& text, int last_line) {
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; number <= last_line && std::getline(lines, line);) {
    ++number;
    const auto tab = line.find_first_not_of(' ');
    if (tab != std::string::npos && line[tab] == '\t') return std::pair(number, tab + 1);
  }
  return std::nullopt;
}

// Walks the tree of a document. It descends into known sections only, so it ends even for a document that
// contains itself by an alias.
class Reader {
 public:
  explicit Reader(std::string name) : name_(std::move(name)) {}

  std::vector<Assignment> read(const YAML::Node& root) {
    if (root.IsMap())
      read_section("", root);
    else if (root.IsDefined() && !root.IsNull())
      fail(root, "", "a configuration must be a map of keys and values, for example nprocs: 2");
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
           fmt::format("{} is set a second time; the first time is in line {}", key, first->second));
    const auto* option = find_option(key);
    if (option != nullptr && !is_section(key)) {
      values_.push_back({option, key, raw(key, name, value), place(name), "file " + place(name)});
    } else if (!is_section(key)) {
      fail(name, key, unknown_key(key));
    } else if (value.IsMap()) {
      read_section(key, value);
    } else if (!value.IsNull()) {  // A section whose lines are all commented out is null.
      fail(name, key, fmt::format("{} is a section with keys below it; it takes no value", key));
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
    if (value.IsNull())
      fail(place, key, fmt::format("{} has no value (write \"\" for an empty string)", key));
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
    const auto document = only_document(text);
    if (!document)
      throw ConfigError(fmt::format("{}: it has several YAML documents; a configuration must be one", name));
    return Reader(name).read(*document);
  } catch (const YAML::Exception& error) {
    if (const auto tab = tab_in_indentation(text, error.mark.line))
      throw ConfigError(
          fmt::format("{}:{}:{}: there is a tab; indent with spaces", name, tab->first, tab->second));
    throw ConfigError(fmt::format("{}:{}:{}: not valid YAML: {}", name, error.mark.line + 1,
                                  error.mark.column + 1, error.msg));
  }
}

RawValue parse_list(const std::string& text, const std::string& subject, const std::string& key) {
  const auto fail = [&](const std::string& why) {
    throw ConfigError(
        fmt::format("{} is not a YAML list: {} (quote items with special characters: ['*.txt'])", subject,
                    why),
        key);
  };
  RawValue list{RawValue::Form::list, {}};
  try {
    const auto document = only_document(text);
    if (!document || !document->IsSequence()) fail("there is more than one list");
    for (const auto& item : *document) {
      if (!item.IsScalar()) fail(fmt::format("item {} is not a string", list.items.size() + 1));
      list.items.push_back(item.Scalar());
    }
  } catch (const YAML::Exception& error) {
    fail(fmt::format("{}, at character {}", error.msg, error.mark.column + 1));
  }
  return list;
}

std::vector<Assignment> read_yaml(const std::string& file) {
  const auto fail = [&](const std::string& why) {
    throw ConfigError(fmt::format("{}: cannot be read: {}", file, why));
  };
  const base::UniqueFd fd(open(file.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  ssize_t count = fd ? 1 : -1;
  while (count > 0 && text.size() <= largest_file) {
    const auto begin = text.size();
    text.resize(begin + (64 << 10));
    count = ::read(fd.get(), text.data() + begin, text.size() - begin);
    text.resize(begin + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    if (count < 0 && errno == EINTR) count = 1;
  }
  if (count < 0 && base::is_shortage(errno)) throw SystemError("reading " + file, errno);
  if (count < 0) fail(errno == EISDIR ? "it is a directory" : base::errno_text(errno));
  if (text.size() > largest_file)
    fail(fmt::format("it has more than {} MiB; a configuration is a few lines of YAML", largest_file >> 20));
  return parse_yaml(text, file);
}

}  // namespace accelmgr::config
