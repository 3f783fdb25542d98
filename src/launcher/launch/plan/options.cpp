#include "launcher/launch/plan/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/config/start_method.hpp"
#include "base/did_you_mean.hpp"
#include "base/parse_number.hpp"
#include "launcher/launch/compat/deprecated_options.hpp"

namespace accelmgr::launch {
namespace {

constexpr std::string_view environment_prefix = "environment.";

[[noreturn]] void refuse_option(const std::string& key, const std::string& value, const std::string& right) {
  throw ConfigError(fmt::format("option {} is '{}'; it must be {}", key, value, right), key);
}

using Set = std::function<void(Options&, const std::string& key, const std::string& value)>;

template <class T>
Set number(T Options::*field, std::string right) {
  return
      [field, right = std::move(right)](Options& options, const std::string& key, const std::string& value) {
        const auto parsed = base::parse_number<T>(value);
        if (!parsed) refuse_option(key, value, right);
        options.*field = *parsed;
      };
}

Set whole(int Options::*field) { return number(field, "a whole number"); }
Set seconds(double Options::*field) { return number(field, "a number of seconds"); }

Set text(std::string Options::*field) {
  return [field](Options& options, const std::string&, const std::string& value) { options.*field = value; };
}

Set boolean(bool Options::*field) {
  return [field](Options& options, const std::string& key, const std::string& value) {
    const bool yes = value == "true" || value == "True" || value == "1";
    if (!yes && value != "false" && value != "False" && value != "0")
      refuse_option(key, value, "true or false");
    options.*field = yes;
  };
}

void set_start_method(Options& options, const std::string& key, const std::string& value) {
  const std::vector<std::string> names(config::start_methods.begin(), config::start_methods.end());
  const auto found = std::ranges::find(names, value);
  if (found == names.end())
    refuse_option(key, value,
                  fmt::format("{}{}", fmt::join(names, " or "), base::did_you_mean(value, names)));
  options.start_method = static_cast<StartMethod>(found - names.begin());
}

const std::map<std::string, Set>& setters() {
  static const std::map<std::string, Set> all = {
      {"nprocs", whole(&Options::nprocs)},
      {"join", boolean(&Options::join)},
      {"daemon", boolean(&Options::daemon)},
      {"start_method", set_start_method},
      {"backend", text(&Options::backend)},
      {"interface", text(&Options::interface)},
      {"gpus", text(&Options::gpus)},
      {"xpus", text(&Options::xpus)},
      {"ips", text(&Options::ips)},
      {"master_addr", text(&Options::master_addr)},
      {"master_port", whole(&Options::master_port)},
      {"workers", text(&Options::workers)},
      {"nnodes", whole(&Options::nnodes)},
      {"node_rank", whole(&Options::node_rank)},
      {"rank_offset", whole(&Options::rank_offset)},
      {"world_size", whole(&Options::world_size)},
      {"setup", text(&Options::setup_name)},
      {"setup_name", text(&Options::setup_name)},
      {"print_config", boolean(&Options::print_config)},
      {"oversubscribe", boolean(&Options::oversubscribe)},
      {"timeout_s", seconds(&Options::timeout_s)},
      {"terminate_timeout_s", seconds(&Options::terminate_timeout_s)},
  };
  return all;
}

std::vector<std::string> known_options() {
  std::vector<std::string> names;
  for (const auto& [name, _] : setters()) names.push_back(name);
  return names;
}

void set(Options& options, const std::string& key, const std::string& value) {
  if (key.size() > environment_prefix.size() && key.starts_with(environment_prefix)) {
    options.environment[key.substr(environment_prefix.size())] = value;
    return;
  }
  if (const auto setter = setters().find(key); setter != setters().end())
    return setter->second(options, key, value);
  const auto names = known_options();
  const auto meant = base::did_you_mean(key, names);
  throw ConfigError(fmt::format("unknown option '{}'{}", key,
                                meant.empty() ? fmt::format("; the options are {}, {}NAME",
                                                            fmt::join(names, ", "), environment_prefix)
                                              : meant),
                    key);
}

}  // namespace

Options options_from(const std::map<std::string, std::string>& texts) {
  Options options;
  for (const auto& [key, value] : without_deprecated(texts)) set(options, key, value);
  return options;
}

std::optional<ipc::HostPort> rendezvous_of(const LaunchConfig& launch) {
  if (launch.rendezvous.empty()) return std::nullopt;
  try {
    return ipc::parse_host_port(launch.rendezvous, launch.nnodes > 1 ? 1 : 0);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("launch.rendezvous: {}", error.what()), "launch.rendezvous");
  }
}

Options options_of(const Config& config) {
  const auto& launch = config.launch;
  Options options;
  options.nprocs = launch.nprocs;
  options.nnodes = launch.nnodes > 1 ? launch.nnodes : 0;
  options.node_rank = launch.nnodes > 1 ? launch.node_rank : -1;
  options.backend = launch.backend;
  options.interface = launch.interface;
  options.gpus = launch.gpus;
  options.workers = launch.workers;
  options.start_method = launch.start_method;
  options.oversubscribe = launch.oversubscribe;
  options.timeout_s = launch.timeout;
  options.terminate_timeout_s = launch.terminate_timeout;
  if (const auto address = rendezvous_of(launch)) {
    options.master_addr = address->host;
    options.master_port = address->port;
  }
  return options;
}

}  // namespace accelmgr::launch
