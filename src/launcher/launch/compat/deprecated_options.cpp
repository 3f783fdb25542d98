#include "launcher/launch/compat/deprecated_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "base/split.hpp"

namespace accelmgr::launch {
namespace {

using Texts = std::map<std::string, std::string>;

// Set by the scheduler of PaddleCloud in each pod.
constexpr const char* cloud_addresses = "PADDLE_TRAINERS";
constexpr const char* cloud_rank = "PADDLE_TRAINER_ID";
constexpr const char* cloud_port = "PADDLE_PORT";

std::optional<std::string> take(Texts& texts, const std::string& deprecated, const std::string& instead) {
  const auto found = texts.find(deprecated);
  if (found == texts.end()) return std::nullopt;
  base::log().warn("option {} is deprecated; {}", deprecated, instead);
  auto value = found->second;
  texts.erase(found);
  return value;
}

void rename(Texts& texts, const std::string& deprecated, const std::string& present) {
  if (auto value = take(texts, deprecated, fmt::format("use {} instead", present)))
    texts.emplace(present, std::move(*value));
}

// node_ip is the address of this host among `ips`. Without ips it is ignored.
void place_node_ip(Texts& texts) {
  const auto address = take(texts, "node_ip", "list this host in ips, or set node_rank");
  const auto ips = texts.find("ips");
  if (!address || ips == texts.end()) return;
  const auto all = base::split(ips->second, ',');
  const auto found = std::ranges::find(all, base::trimmed(*address));
  if (found == all.end())
    throw ConfigError(
        fmt::format("option node_ip is '{}', which is not among ips ({})", *address, ips->second), "node_ip");
  texts.emplace("node_rank", std::to_string(found - all.begin()));
}

const std::string& of_cloud(const Texts& environment, const char* variable) {
  const auto found = environment.find(variable);
  if (found == environment.end() || found->second.empty())
    throw ConfigError(fmt::format("option use_paddlecloud is true, but the environment has no {}", variable),
                      "use_paddlecloud");
  return found->second;
}

void use_cloud(Texts& texts, const Texts& environment) {
  const auto use = take(texts, "use_paddlecloud", "use ips, node_rank and master_port instead");
  if (!use || *use == "false" || *use == "False" || *use == "0") return;
  if (*use != "true" && *use != "True" && *use != "1")
    throw ConfigError(fmt::format("option use_paddlecloud is '{}'; it must be true or false", *use),
                      "use_paddlecloud");
  texts.emplace("ips", of_cloud(environment, cloud_addresses));
  texts.emplace("node_rank", of_cloud(environment, cloud_rank));
  if (const auto port = environment.find(cloud_port); port != environment.end())
    texts.emplace("master_port", port->second);
}

}  // namespace

Texts without_deprecated(Texts texts, const Texts& environment) {
  const auto backend = texts.find("backend");
  rename(texts, "selected_devices", backend != texts.end() && backend->second == "bkcl" ? "xpus" : "gpus");
  rename(texts, "started_port", "master_port");
  rename(texts, "cluster_node_ips", "ips");
  use_cloud(texts, environment);
  place_node_ip(texts);
  return texts;
}

}  // namespace accelmgr::launch
