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

// node_ip is the address of this node among `ips`. Without ips it is ignored.
void place_node_ip(Texts& texts) {
  const auto address = take(texts, "node_ip", "list this node in ips, or set node_rank");
  const auto ips = texts.find("ips");
  if (!address || ips == texts.end()) return;
  const auto all = base::split(ips->second, ',');
  const auto found = std::ranges::find(all, base::trimmed(*address));
  if (found == all.end())
    throw ConfigError(
        fmt::format("option node_ip is '{}', which is not among ips ({})", *address, ips->second), "node_ip");
  texts.emplace("node_rank", std::to_string(found - all.begin()));
}

// The variables of that platform are not read.
void refuse_cloud(Texts& texts) {
  const std::string instead = "use ips, node_rank and master_port instead";
  const auto use = take(texts, "use_paddlecloud", instead);
  if (use && *use != "false" && *use != "False" && *use != "0")
    throw ConfigError(fmt::format("option use_paddlecloud is '{}'; it must be false: {}", *use, instead),
                      "use_paddlecloud");
}

}  // namespace

Texts without_deprecated(Texts texts) {
  const auto backend = texts.find("backend");
  rename(texts, "selected_devices", backend != texts.end() && backend->second == "bkcl" ? "xpus" : "gpus");
  rename(texts, "started_port", "master_port");
  rename(texts, "cluster_node_ips", "ips");
  refuse_cloud(texts);
  place_node_ip(texts);
  return texts;
}

}  // namespace accelmgr::launch
