// Combines the configuration of a run from four sources, strongest first: flag, environment, file, default.
//
// Except for accelmgr_environment() and the file that load_config() reads, these functions depend on their
// arguments alone. Their errors are ConfigError. Its text names the place (file and line, variable, flag),
// the key, the value and the allowed values; for an unknown key, also the nearest known one.
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
  /// or "flag". A map with free names has one for each of its entries (`model.options.depth`).
  std::map<std::string, std::string> sources;
  /// Command-line options that stand for keys, by key: `--nprocs` for `launch.nprocs`.
  std::map<std::string, std::string> flags = {};

  /// How an error names this key: by its command-line option, if that set the key or nothing did.
  std::string name(const std::string& key) const;
  /// Returns `text` with each key in it replaced by its name().
  std::string with_names(std::string_view text) const;
};

/// A value from the command line or from a call.
struct Setting {
  std::string assignment;  ///< key=value
  std::string where = {};  ///< How errors name the place: `Manager(nprocs=0)`; empty: `--set key=value`.
  std::string flag = {};   ///< The option that was typed, if it is one of the key's own: `--steps`.
};

/// Environment variables of this process that begin with ACCELMGR_.
std::map<std::string, std::string> accelmgr_environment();

/// Reads `file` (YAML; empty: none), then `environment`, then `settings`, and validates the result. A
/// variable is ACCELMGR_ and the key in capitals, with two underscores for a dot. Other variables are
/// ignored, unless they look like a misspelt key: then it throws. Of several settings of a key the last
/// counts. Commas separate the items of a list. `flags` become LoadedConfig::flags. For a key that
/// a setting sets, the option that was typed replaces the entry; without such an option it is removed. Unless
/// `runners.device` is cpu, an nprocs that no source sets is one_per_device.
LoadedConfig load_config(const std::string& file, std::span<const Setting> settings,
                         const std::map<std::string, std::string>& environment,
                         std::map<std::string, std::string> flags = {});

/// Checks the range of every value, and the rules between values. Does not check whether a model or a source
/// of that name is registered: other floors do.
void validate(const Config& config);

/// Returns warnings, one sentence each, about values that work but are probably not intended: more threads
/// than `cores`, settings that nothing reads.
std::vector<std::string> warnings(const Config& config, int cores);

/// What a program that makes the steps itself passes as objects instead of by name.
struct Own {
  bool model = false;
  bool data = false;
};
/// A key that was set although nothing reads it in such a program.
struct Unread {
  std::string key;
  std::string source;  ///< As in LoadedConfig.
  std::string why;     ///< "the program makes its optimizer itself, over the manager's parameters"
};
/// Finds such keys in `loaded`.
std::vector<Unread> unread(const LoadedConfig& loaded, const Own& own);

/// Every key with its value and source, aligned, one per line.
std::string show(const LoadedConfig& loaded);

/// Every option with type, default and help, as text for readers.
std::string reference();

/// The whole configuration as YAML. from_yaml() returns an equal Config: doubles and strings keep every bit.
std::string to_yaml(const Config& config);
Config from_yaml(const std::string& yaml);

}  // namespace accelmgr::config
