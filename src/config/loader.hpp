// The configuration of a run from its four sources, strongest first: flag, environment, file, default.
//
// Pure functions but for the file that is read: the environment is an argument. All throw ConfigError, whose
// text names the place (file and line, variable, flag), the key, the value and what is allowed, and the
// nearest known key for an unknown one.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

struct LoadedConfig {
  Config config;
  /// Where each value came from, by dotted key: "default", "file run.yaml:7", "environment ACCELMGR_NPROCS"
  /// or "flag". Of a free map (`model.options`) the entries there are (`model.options.depth`).
  std::map<std::string, std::string> sources;
  /// Options of the command, by key: `launch.nprocs` is `--nprocs`.
  std::map<std::string, std::string> flags = {};

  /// How an error names this key: by its option, if that set it or nothing did.
  std::string name(const std::string& key) const;
  /// `text` with name() for each key in it.
  std::string with_names(std::string_view text) const;
};

/// A value that a command or a call gives.
struct Setting {
  std::string assignment;  ///< key=value
  std::string where = {};  ///< How errors name it: `Manager(nprocs=0)`; empty: `--set key=value`.
  std::string flag = {};   ///< The option that was typed, if it is one of the key's own: `--steps`.
};

/// The variables of this process that begin with ACCELMGR_.
std::map<std::string, std::string> accelmgr_environment();

/// Reads `file` (YAML; empty: none), then `environment` (ACCELMGR_ and the key in capitals, dots as two
/// underscores; other variables are passed over unless they look like a misspelt key), then `settings` (the
/// last of a key counts; the items of a list are separated by commas), and validates the whole. `flags` are
/// those of LoadedConfig; one that was typed counts instead.
LoadedConfig load_config(const std::string& file, std::span<const Setting> settings,
                         const std::map<std::string, std::string>& environment,
                         std::map<std::string, std::string> flags = {});

/// Ranges of all values, and what holds between them. Whether a model or source of that name is registered is
/// known to the floors above.
void validate(const Config& config);

/// What will work but is hardly meant, one sentence each: more threads than `cores`, settings that nothing
/// reads.
std::vector<std::string> warnings(const Config& config, int cores);

/// What a program that makes the steps itself passes as objects, not by name.
struct Own {
  bool model = false;
  bool data = false;
};
/// A key that was set, and that nothing reads in such a program.
struct Unread {
  std::string key;
  std::string source;  ///< As in LoadedConfig.
  std::string why;     ///< "the program makes its optimizer itself, over the manager's parameters"
};
std::vector<Unread> unread(const LoadedConfig& loaded, const Own& own);

/// Every key, value and source, aligned, one a line.
std::string show(const LoadedConfig& loaded);

/// Every option with type, default and help, for people.
std::string reference();

/// The whole configuration as text: from_yaml() gives an equal Config, doubles and strings to the last bit.
std::string to_yaml(const Config& config);
Config from_yaml(const std::string& yaml);

}  // namespace accelmgr::config
