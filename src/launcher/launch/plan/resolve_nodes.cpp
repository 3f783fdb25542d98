// Chooses the number of nodes, the place of this one, its ranks, and the address where all meet.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/algorithm/string/case_conv.hpp>
#include <boost/asio/ip/address.hpp>
#include <utility>

#include "base/parse_number.hpp"
#include "base/split.hpp"
#include "launcher/launch/compat/variables.hpp"
#include "launcher/launch/plan/resolution.hpp"
#include "launcher/launch/plan/variables.hpp"

namespace accelmgr::launch {
namespace {

constexpr int port_between_nodes = 2222;

// For comparison: an address can be written in several ways, and names ignore case.
std::string normal_form(const std::string& host) {
  boost::system::error_code not_an_address;
  const auto address = boost::asio::ip::make_address(host, not_an_address);
  return not_an_address ? boost::algorithm::to_lower_copy(host) : address.to_string();
}

bool is_this(const std::string& host, const NodeInfo& node_info) {
  const auto wanted = normal_form(host);
  const auto name = normal_form(node_info.hostname);
  if (wanted == name || wanted == name.substr(0, name.find('.'))) return true;
  return std::ranges::any_of(node_info.addresses,
                             [&](const auto& own) { return normal_form(own) == wanted; });
}

struct Claim {
  int nodes;
  std::string source;
  std::string key;
};

int nodes_of_environment(const Resolution& r) {
  const auto value = r.environment_of_nodes(variable::xla_world_size);
  if (r.spec.xla.form == WorkerForm::none || value.empty()) return 0;
  const auto nodes = base::parse_number<int>(value);
  if (!nodes || *nodes < 1 || *nodes > most_nodes)
    refuse("nnodes",
           fmt::format("environment {} is '{}'; before a launch it must be the number of nodes, from 1 to {}",
                       variable::xla_world_size, value, most_nodes));
  return *nodes;
}

std::vector<Claim> claims(const Resolution& r) {
  std::vector<Claim> all = {
      {r.options.nnodes, "option nnodes", "nnodes"},
      {nodes_of_environment(r), fmt::format("environment {}", variable::xla_world_size), "nnodes"},
      {static_cast<int>(r.spec.ips.size()), "option ips", "ips"},
      {static_cast<int>(r.spec.xla.nodes.size()), r.worker_source, "workers"}};
  std::erase_if(all, [](const Claim& claim) { return claim.nodes == 0; });
  return all;
}

void choose_nnodes(Resolution& r) {
  const auto all = claims(r);
  for (const auto& claim : all)
    if (claim.nodes != all.front().nodes)
      refuse(claim.key, fmt::format("the number of nodes is {} according to {}, but {} according to {}",
                                    all.front().nodes, all.front().source, claim.nodes, claim.source));
  if (!all.empty()) {
    r.spec.nnodes = all.front().nodes;
    return r.from("nnodes", all.front().source);
  }
  if (r.options.world_size == 0) return r.from("nnodes", "default: one node");
  if (r.options.world_size % r.spec.nprocs != 0)
    refuse("world_size", fmt::format("world_size is {}, not a multiple of nprocs, which is {} ({}); if "
                                     "nodes have different numbers of processes, set nnodes and node_rank",
                                     r.options.world_size, r.spec.nprocs, r.spec.sources.at("nprocs")));
  r.spec.nnodes = r.options.world_size / r.spec.nprocs;
  r.from("nnodes", "world_size / nprocs");
}

// Several nodes need an address where all processes can find each other.
void check_meeting_place(const Resolution& r) {
  const auto& spec = r.spec;
  if (spec.nnodes == 1) return;
  const auto nodes = fmt::format("there are {} nodes ({})", spec.nnodes, spec.sources.at("nnodes"));
  if (spec.xla.form == WorkerForm::worker && spec.xla.nodes.empty())
    refuse("workers", fmt::format("{}, but neither option workers nor {} is set; more than one node needs "
                                  "one of them",
                                  nodes, variable::workers));
  if (spec.ips.empty() && spec.xla.nodes.empty() && r.options.master_addr.empty())
    refuse("nnodes", fmt::format("{}, but no address where they meet is given; set ips, workers, or "
                                 "master_addr (the rendezvous)",
                                 nodes));
}

int place_of_local_worker(const Resolution& r, const std::string& value) {
  const auto worker = parse_local_worker(value);
  const auto& nodes = r.spec.xla.nodes;
  if (nodes.empty()) return worker.ordinal;
  const auto found = std::ranges::find_if(
      nodes, [&](const Worker& node) { return node.name == worker.name && node.ordinal == worker.ordinal; });
  if (found == nodes.end())
    refuse("workers",
           fmt::format("environment {} is '{}', which is not among the workers ({}; {})",
                       variable::local_worker, value, text(nodes, r.spec.xla.form), r.worker_source));
  return static_cast<int>(found - nodes.begin());
}

std::pair<int, std::string> find_node_rank(const Resolution& r) {
  const auto& spec = r.spec;
  if (r.options.node_rank >= 0) return {r.options.node_rank, from_option};
  if (spec.xla.form != WorkerForm::none)
    if (const auto local = r.environment_of_nodes(variable::local_worker); !local.empty())
      return {place_of_local_worker(r, local), fmt::format("environment {}", variable::local_worker)};
  if (spec.nnodes == 1) return {0, "default: one node"};
  if (!spec.ips.empty()) return {own_place(spec.ips, r.node_info, "ips"), "option ips"};
  if (!spec.xla.nodes.empty()) {
    std::vector<std::string> nodes;
    for (const auto& worker : spec.xla.nodes) nodes.push_back(worker.address.host);
    return {own_place(nodes, r.node_info, "workers"), r.worker_source};
  }
  if (r.options.rank_offset % spec.nprocs != 0)
    refuse("node_rank",
           fmt::format("rank_offset is {}, not a multiple of nprocs, which is {}; set node_rank to say "
                       "which of the {} nodes this one is",
                       r.options.rank_offset, spec.nprocs, spec.nnodes));
  return {r.options.rank_offset / spec.nprocs, "rank_offset / nprocs"};
}

void choose_node_rank(Resolution& r) {
  auto& spec = r.spec;
  const auto [place, source] = find_node_rank(r);
  if (place >= spec.nnodes)
    refuse("node_rank",
           fmt::format("node_rank is {} ({}), but there are {} nodes ({}); they are counted from 0", place,
                       source, spec.nnodes, spec.sources.at("nnodes")));
  spec.node_rank = place;
  r.from("node_rank", source);
}

// Nodes may have unequal numbers of processes only if the options give the number of nodes and, except on
// node 0, the first rank of this node.
void choose_ranks(Resolution& r) {
  auto& spec = r.spec;
  const int even = spec.nprocs * spec.nnodes;
  spec.world_size = r.options.world_size > 0 ? r.options.world_size : even;
  r.from("world_size", r.options.world_size > 0 ? from_option : "nprocs * nnodes");
  const int even_offset = spec.nprocs * spec.node_rank;
  spec.rank_offset = r.options.rank_offset > 0 ? r.options.rank_offset : even_offset;
  r.from("rank_offset", r.options.rank_offset > 0 ? from_option : "nprocs * node_rank");

  const bool configured = !spec.xla.nodes.empty() || !spec.ips.empty();
  const bool may_differ = r.options.nnodes > 0 && !configured &&
                          (spec.node_rank == 0 || r.options.rank_offset > 0) &&
                          spec.world_size >= spec.nprocs + spec.nnodes - 1;
  if (spec.world_size != even && !may_differ)
    refuse("world_size",
           fmt::format("world_size is {}, but {} nodes ({}) of {} processes (nprocs, {}) make {}",
                       spec.world_size, spec.nnodes, spec.sources.at("nnodes"), spec.nprocs,
                       spec.sources.at("nprocs"), even));
  if (configured && spec.rank_offset != even_offset)
    refuse("rank_offset",
           fmt::format("rank_offset is {}, but the ranks of node {} ({}) begin at {}", spec.rank_offset,
                       spec.node_rank, spec.sources.at("node_rank"), even_offset));
  if (spec.rank_offset > spec.world_size - spec.nprocs)
    refuse("rank_offset",
           fmt::format("rank_offset is {} and nprocs {}; together they exceed world_size, which is {} ({})",
                       spec.rank_offset, spec.nprocs, spec.world_size, spec.sources.at("world_size")));
}

void choose_master(Resolution& r) {
  auto& spec = r.spec;
  if (!r.options.master_addr.empty()) {
    spec.master_addr = r.options.master_addr;
    r.from("master_addr", from_option);
  } else if (!spec.ips.empty()) {
    spec.master_addr = spec.ips.front();
    r.from("master_addr", "option ips");
  } else if (spec.nnodes > 1) {
    spec.master_addr = spec.xla.nodes.front().address.host;
    r.from("master_addr", r.worker_source);
  } else {
    spec.master_addr = "127.0.0.1";
    r.from("master_addr", "default: one node");
  }
  spec.master_port = r.options.master_port;
  if (spec.master_port > 0) return r.from("master_port", from_option);
  if (spec.nnodes > 1) spec.master_port = port_between_nodes;
  r.from("master_port", spec.nnodes > 1 ? "default: several nodes" : "default: not set");
}

void choose_interface(Resolution& r) {
  r.spec.interface = r.options.interface.empty() ? r.variable(variable::interface) : r.options.interface;
  r.from("interface", r.spec.interface.empty()      ? "default: the ranks choose it"
                      : r.options.interface.empty() ? fmt::format("environment {}", variable::interface)
                                                    : from_option);
}

void read_ips(Resolution& r) {
  r.spec.ips = base::split(r.options.ips, ',');
  r.from("ips", r.spec.ips.empty() ? "default: none" : from_option);
  for (const auto& node : r.spec.ips)
    if (node.empty())
      refuse("ips", fmt::format("option ips is '{}', which has an empty address in it; it must be addresses "
                                "or names, separated by commas",
                                r.options.ips));
}

}  // namespace

int own_place(const std::vector<std::string>& nodes, const NodeInfo& node_info, const std::string& key) {
  std::vector<int> places;
  for (std::size_t i = 0; i < nodes.size(); ++i)
    if (is_this(nodes[i], node_info)) places.push_back(static_cast<int>(i));
  if (places.size() == 1) return places.front();
  refuse(key,
         fmt::format(
             "{} of {} ({}) is this node, {} with the addresses {}; set node_rank to say which one it is",
             places.empty() ? "none" : "more than one", key, fmt::join(nodes, ", "), node_info.hostname,
             fmt::join(node_info.addresses, ", ")));
}

void choose_nodes(Resolution& r) {
  read_ips(r);
  choose_nnodes(r);
  check_meeting_place(r);
  choose_node_rank(r);
  choose_ranks(r);
  choose_master(r);
  choose_interface(r);
}

}  // namespace accelmgr::launch
