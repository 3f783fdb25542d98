#include "launcher/distributed/context/world_environment.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/parse_number.hpp"
#include "launcher/collective/nodes/hierarchical.hpp"
#include "launcher/collective/nodes/nodes.hpp"
#include "launcher/launch/plan/variables.hpp"

namespace accelmgr::distributed {
namespace {

namespace variable = launch::variable;

// Of torch's gloo: names of interfaces, separated by commas.
constexpr const char* gloo_interfaces = "GLOO_SOCKET_IFNAME";

std::string text_of(const Lookup& lookup, const char* name) {
  const char* text = lookup(name);
  return text == nullptr ? "" : text;
}

std::optional<int> number_of(const Lookup& lookup, const char* name, int least, int most) {
  const auto text = text_of(lookup, name);
  if (text.empty()) return std::nullopt;
  const auto number = base::parse_number<int>(text);
  if (!number || *number < least || *number > most)
    throw ConfigError(most == INT_MAX
                          ? fmt::format("{}={}: it must be a number of at least {}", name, text, least)
                          : fmt::format("{}={}: it must be a number from {} to {}", name, text, least, most));
  return number;
}

std::optional<double> seconds_of(const Lookup& lookup, const char* name) {
  const auto text = text_of(lookup, name);
  if (text.empty()) return std::nullopt;
  const auto seconds = base::parse_number<double>(text);
  if (!seconds || !std::isfinite(*seconds) || *seconds <= 0)
    throw ConfigError(fmt::format("{}={}: it must be a number of seconds above 0", name, text));
  return seconds;
}

bool is_true(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text == "true" || text == "1";
}

void check_below(const char* name, std::optional<int> value, const char* bound_name,
                 std::optional<int> bound) {
  if (value && bound && *value >= *bound)
    throw ConfigError(fmt::format("{}={} contradicts {}={}: it must be less than {}", name, *value,
                                  bound_name, *bound, *bound));
}

}  // namespace

bool is_loopback(std::string_view address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

Environment read_environment(const Lookup& lookup) {
  Environment e;
  e.rank = number_of(lookup, variable::rank, 0, INT_MAX);
  e.world_size = number_of(lookup, variable::world_size, 1, INT_MAX);
  e.local_rank = number_of(lookup, variable::local_rank, 0, INT_MAX);
  e.local_world_size = number_of(lookup, variable::local_world_size, 1, INT_MAX);
  e.node_rank = number_of(lookup, variable::node_rank, 0, INT_MAX);
  e.node_count = number_of(lookup, variable::node_count, 1, INT_MAX);
  e.master_addr = text_of(lookup, variable::master_addr);
  e.master_port = number_of(lookup, variable::master_port, 0, 65535).value_or(0);
  e.agent_store = is_true(text_of(lookup, variable::agent_store));
  e.restart_count = number_of(lookup, variable::restart_count, 0, INT_MAX).value_or(0);
  e.backend = text_of(lookup, variable::backend);
  e.interface = text_of(lookup, variable::interface);
  if (e.interface.empty()) e.interface = text_of(lookup, gloo_interfaces);
  e.interface.erase(std::min(e.interface.find(','), e.interface.size()));
  e.timeout_s = seconds_of(lookup, variable::timeout);
  e.world_memory = text_of(lookup, variable::world_memory);
  check_below(variable::rank, e.rank, variable::world_size, e.world_size);
  check_below(variable::local_rank, e.local_rank, variable::local_world_size, e.local_world_size);
  check_below(variable::node_rank, e.node_rank, variable::node_count, e.node_count);
  if (e.local_world_size && e.world_size && *e.local_world_size > *e.world_size)
    throw ConfigError(fmt::format("{}={} contradicts {}={}: a node cannot have more processes than the world",
                                  variable::local_world_size, *e.local_world_size, variable::world_size,
                                  *e.world_size));
  return e;
}

Environment read_environment() {
  return read_environment([](const char* name) { return std::getenv(name); });
}

bool environment_has_ranks() noexcept {
  return std::getenv(variable::rank) != nullptr && std::getenv(variable::world_size) != nullptr;
}

Place place_of(const Environment& environment) {
  Place place{*environment.rank,      *environment.world_size,
              environment.local_rank, environment.local_world_size,
              environment.node_rank,  environment.node_count};
  const bool one_node = place.world_size == 1 || place.local_world_size == place.world_size ||
                        (!place.local_world_size && is_loopback(environment.master_addr));
  if (one_node) {
    if (!place.local_rank) place.local_rank = place.rank;
    place.local_world_size = place.world_size;
    place.node_rank = 0;
    place.node_count = 1;
  } else if (place.local_world_size && place.world_size % *place.local_world_size == 0) {
    // Assumes that each node has the same number of consecutive ranks, as every launcher does.
    if (!place.node_count) place.node_count = place.world_size / *place.local_world_size;
    if (!place.node_rank) place.node_rank = place.rank / *place.local_world_size;
    if (!place.local_rank) place.local_rank = place.rank % *place.local_world_size;
  }
  return place;
}

Place place_among(int rank, const std::vector<std::string>& nodes) {
  const collective::NodeLayout layout(collective::nodes_of(nodes), rank);
  const auto number = [](std::size_t count) { return static_cast<int>(count); };
  return {rank,
          number(nodes.size()),
          number(layout.local),
          number(layout.nodes[layout.node].size()),
          number(layout.node),
          number(layout.nodes.size())};
}

}  // namespace accelmgr::distributed
