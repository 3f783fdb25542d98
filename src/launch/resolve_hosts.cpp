// How many hosts, which one this is, which ranks are here, where all meet.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "launch/parse_number.hpp"
#include "launch/resolution.hpp"
#include "launch/split.hpp"
#include "launch/variables.hpp"

namespace accelmgr::launch {
namespace {

constexpr int port_between_hosts = 2222;

// An address can be written in several ways, a name in any case.
std::string normal_form(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> bytes{};
  std::array<char, INET6_ADDRSTRLEN> text{};
  for (const int family : {AF_INET, AF_INET6})
    if (::inet_pton(family, host.c_str(), bytes.data()) == 1)
      return ::inet_ntop(family, bytes.data(), text.data(), text.size());
  std::string lower = host;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

bool is_this(const std::string& host, const Machine& machine) {
  const auto wanted = normal_form(host);
  const auto name = normal_form(machine.hostname);
  if (wanted == name || wanted == name.substr(0, name.find('.'))) return true;
  return std::ranges::any_of(machine.addresses, [&](const auto& own) { return normal_form(own) == wanted; });
}

struct Claim {
  int hosts;
  std::string source;
  std::string key;
};

int hosts_of_environment(const Resolution& r) {
  const auto value = r.environment_of_hosts(variable::xla_world_size);
  if (r.plan.worker_form == WorkerForm::none || value.empty()) return 0;
  const auto hosts = parse_number<int>(value);
  if (!hosts || *hosts < 1 || *hosts > most_hosts)
    refuse("nnodes",
           fmt::format("environment {} is '{}'; before a launch it is the number of hosts, from 1 to {}",
                       variable::xla_world_size, value, most_hosts));
  return *hosts;
}

std::vector<Claim> claims(const Resolution& r) {
  std::vector<Claim> all = {
      {r.options.nnodes, "option nnodes", "nnodes"},
      {hosts_of_environment(r), fmt::format("environment {}", variable::xla_world_size), "nnodes"},
      {static_cast<int>(r.plan.ips.size()), "option ips", "ips"},
      {static_cast<int>(r.plan.worker_hosts.size()), r.worker_source, "workers"}};
  std::erase_if(all, [](const Claim& claim) { return claim.hosts == 0; });
  return all;
}

void choose_nnodes(Resolution& r) {
  const auto all = claims(r);
  for (const auto& claim : all)
    if (claim.hosts != all.front().hosts)
      refuse(claim.key, fmt::format("the number of hosts is {} by {}, but {} by {}", all.front().hosts,
                                    all.front().source, claim.hosts, claim.source));
  if (!all.empty()) {
    r.plan.nnodes = all.front().hosts;
    return r.from("nnodes", all.front().source);
  }
  if (r.options.world_size == 0) return r.from("nnodes", "default: one host");
  if (r.options.world_size % r.plan.nprocs != 0)
    refuse("world_size", fmt::format("world_size is {}, no multiple of nprocs, which is {} ({}): where hosts "
                                     "differ, nnodes and node_rank must say how many there are, and which "
                                     "this one is",
                                     r.options.world_size, r.plan.nprocs, r.plan.sources.at("nprocs")));
  r.plan.nnodes = r.options.world_size / r.plan.nprocs;
  r.from("nnodes", "world_size / nprocs");
}

// Where all processes can learn of each other.
void check_meeting_place(const Resolution& r) {
  const auto& plan = r.plan;
  if (plan.nnodes == 1) return;
  const auto hosts = fmt::format("there are {} hosts ({})", plan.nnodes, plan.sources.at("nnodes"));
  if (plan.worker_form == WorkerForm::worker && plan.worker_hosts.empty())
    refuse("workers", fmt::format("{}, but workers are configured neither by option workers nor by {}: more "
                                  "than one host needs them",
                                  hosts, variable::workers));
  if (plan.ips.empty() && plan.worker_hosts.empty() && r.options.master_addr.empty())
    refuse("nnodes", fmt::format("{}, but nothing says where they meet: ips, workers, or master_addr (the "
                                 "rendezvous) must",
                                 hosts));
}

int place_of_local_worker(const Resolution& r, const std::string& value) {
  const auto worker = parse_local_worker(value);
  const auto& hosts = r.plan.worker_hosts;
  if (hosts.empty()) return worker.ordinal;
  const auto found = std::ranges::find_if(
      hosts, [&](const Worker& host) { return host.name == worker.name && host.ordinal == worker.ordinal; });
  if (found == hosts.end())
    refuse("workers",
           fmt::format("environment {} is '{}', which is not among the workers ({}; {})",
                       variable::local_worker, value, text(hosts, r.plan.worker_form), r.worker_source));
  return static_cast<int>(found - hosts.begin());
}

std::pair<int, std::string> find_node_rank(const Resolution& r) {
  const auto& plan = r.plan;
  if (r.options.node_rank >= 0) return {r.options.node_rank, from_option};
  if (plan.worker_form != WorkerForm::none)
    if (const auto local = r.environment_of_hosts(variable::local_worker); !local.empty())
      return {place_of_local_worker(r, local), fmt::format("environment {}", variable::local_worker)};
  if (plan.nnodes == 1) return {0, "default: one host"};
  if (!plan.ips.empty()) return {own_place(plan.ips, r.machine, "ips"), "option ips"};
  if (!plan.worker_hosts.empty()) {
    std::vector<std::string> hosts;
    for (const auto& worker : plan.worker_hosts) hosts.push_back(worker.address.host);
    return {own_place(hosts, r.machine, "workers"), r.worker_source};
  }
  if (r.options.rank_offset % plan.nprocs != 0)
    refuse(
        "node_rank",
        fmt::format("rank_offset is {}, no multiple of nprocs, which is {}: node_rank must say which of the "
                    "{} hosts this one is",
                    r.options.rank_offset, plan.nprocs, plan.nnodes));
  return {r.options.rank_offset / plan.nprocs, "rank_offset / nprocs"};
}

void choose_node_rank(Resolution& r) {
  auto& plan = r.plan;
  const auto [place, source] = find_node_rank(r);
  if (place >= plan.nnodes)
    refuse("node_rank", fmt::format("node_rank is {} ({}), but there are {} hosts ({}); they count from 0",
                                    place, source, plan.nnodes, plan.sources.at("nnodes")));
  plan.node_rank = place;
  r.from("node_rank", source);
}

// Hosts may have unequal numbers of processes only if the options say so: how many hosts there are, and where
// the ranks of this one begin.
void choose_ranks(Resolution& r) {
  auto& plan = r.plan;
  const int even = plan.nprocs * plan.nnodes;
  plan.world_size = r.options.world_size > 0 ? r.options.world_size : even;
  r.from("world_size", r.options.world_size > 0 ? from_option : "nprocs * nnodes");
  const int even_offset = plan.nprocs * plan.node_rank;
  plan.rank_offset = r.options.rank_offset > 0 ? r.options.rank_offset : even_offset;
  r.from("rank_offset", r.options.rank_offset > 0 ? from_option : "nprocs * node_rank");

  const bool configured = !plan.worker_hosts.empty() || !plan.ips.empty();
  const bool may_differ = r.options.nnodes > 0 && !configured &&
                          (plan.node_rank == 0 || r.options.rank_offset > 0) &&
                          plan.world_size >= plan.nprocs + plan.nnodes - 1;
  if (plan.world_size != even && !may_differ)
    refuse("world_size",
           fmt::format("world_size is {}, but {} hosts ({}) of {} processes (nprocs, {}) make {}",
                       plan.world_size, plan.nnodes, plan.sources.at("nnodes"), plan.nprocs,
                       plan.sources.at("nprocs"), even));
  if (configured && plan.rank_offset != even_offset)
    refuse("rank_offset",
           fmt::format("rank_offset is {}, but the ranks of host {} ({}) begin at {}", plan.rank_offset,
                       plan.node_rank, plan.sources.at("node_rank"), even_offset));
  if (plan.rank_offset > plan.world_size - plan.nprocs)
    refuse("rank_offset",
           fmt::format("rank_offset is {} and nprocs {}, beyond world_size, which is {} ({})",
                       plan.rank_offset, plan.nprocs, plan.world_size, plan.sources.at("world_size")));
}

void choose_master(Resolution& r) {
  auto& plan = r.plan;
  if (!r.options.master_addr.empty()) {
    plan.master_addr = r.options.master_addr;
    r.from("master_addr", from_option);
  } else if (!plan.ips.empty()) {
    plan.master_addr = plan.ips.front();
    r.from("master_addr", "option ips");
  } else if (plan.nnodes > 1) {
    plan.master_addr = plan.worker_hosts.front().address.host;
    r.from("master_addr", r.worker_source);
  } else {
    plan.master_addr = "127.0.0.1";
    r.from("master_addr", "default: one host");
  }
  plan.master_port = r.options.master_port;
  if (plan.master_port > 0) return r.from("master_port", from_option);
  if (plan.nnodes > 1) plan.master_port = port_between_hosts;
  r.from("master_port", plan.nnodes > 1 ? "default: several hosts" : "default: none is told");
}

void read_ips(Resolution& r) {
  r.plan.ips = split(r.options.ips, ',');
  r.from("ips", r.plan.ips.empty() ? "default: none" : from_option);
  for (const auto& host : r.plan.ips)
    if (host.empty())
      refuse("ips", fmt::format("option ips is '{}', with an empty address in it; it must be addresses or "
                                "names, separated by commas",
                                r.options.ips));
}

}  // namespace

int own_place(const std::vector<std::string>& hosts, const Machine& machine, const std::string& key) {
  std::vector<int> places;
  for (std::size_t i = 0; i < hosts.size(); ++i)
    if (is_this(hosts[i], machine)) places.push_back(static_cast<int>(i));
  if (places.size() == 1) return places.front();
  refuse(key,
         fmt::format("{} of {} ({}) is this host, {} with the addresses {}; node_rank can say which it is",
                     places.empty() ? "none" : "more than one", key, fmt::join(hosts, ", "), machine.hostname,
                     fmt::join(machine.addresses, ", ")));
}

void choose_hosts(Resolution& r) {
  read_ips(r);
  choose_nnodes(r);
  check_meeting_place(r);
  choose_node_rank(r);
  choose_ranks(r);
  choose_master(r);
}

}  // namespace accelmgr::launch
