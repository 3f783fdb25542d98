#include "command_line.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "base/did_you_mean.hpp"

namespace accelmgr::program {
namespace {

std::vector<std::string> subcommands_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const auto* subcommand : command.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(subcommand->get_name());
  return names;
}

/// With the names of its parents: "accelmgr config".
std::string full_name(const CLI::App& command) {
  const auto* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : full_name(*parent) + " " + command.get_name();
}

std::string unknown_option(const CLI::App& command, const std::string& word) {
  const auto name = word.substr(0, word.find('='));
  std::vector<std::string> known;
  for (const auto* option : command.get_options())
    if (!option->get_group().empty() && !option->get_lnames().empty())
      known.push_back("--" + option->get_lnames().front());
  const auto meant = base::did_you_mean(name, known);
  return fmt::format("{}: unknown option '{}'{}", full_name(command), name,
                     meant.empty() ? fmt::format("; {} --help lists them", full_name(command)) : meant);
}

}  // namespace

std::string Formatter::make_option_name(const CLI::Option* option, bool is_positional) const {
  if (is_positional) return CLI::Formatter::make_option_name(option, is_positional);
  std::vector<std::string> names;
  for (const auto& name : option->get_snames()) names.push_back("-" + name);
  for (const auto& name : option->get_lnames())
    if (name.find('_') == std::string::npos) names.push_back("--" + name);
  return fmt::format("{}", fmt::join(names, ","));
}

std::string misunderstood(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  if (!parsed.empty()) return misunderstood(*parsed.front());
  const auto names = subcommands_of(app);
  const auto words = app.remaining();
  const bool is_program = app.get_prefix_command();  // The remaining words belong to another program.
  if (is_program && app.get_options().empty()) return "";
  if (!words.empty() && words.front().starts_with('-')) return unknown_option(app, words.front());
  if (is_program) return "";
  if (!words.empty() && names.empty())
    return fmt::format("{}: unexpected argument '{}'", full_name(app), words.front());
  if (!words.empty()) {
    const auto meant = base::did_you_mean(words.front(), names);
    return fmt::format("{}: unknown command '{}'{}", full_name(app), words.front(),
                       meant.empty() ? fmt::format("; the commands are {}", fmt::join(names, ", ")) : meant);
  }
  if (names.empty() || app.get_parent() == nullptr) return "";
  return fmt::format("{}: a command is missing: {}", full_name(app), fmt::join(names, ", "));
}

}  // namespace accelmgr::program
