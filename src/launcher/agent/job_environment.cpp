#include "launcher/agent/job_environment.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/parse_number.hpp"

namespace accelmgr::agent {
namespace {

using Environment = std::map<std::string, std::string>;

constexpr int first_port = 29400;  // That of torchrun's rendezvous.
constexpr int ports = 1000;        // Jobs that share a node have different ports, mostly.

struct Launcher {
  const char* size;        ///< The variable that says how many processes the job has.
  const char* rank;        ///< The variable that says which of them this process is.
  const char* local_size;  ///< Processes on this node; "": the launcher has no such variable.
  const char* nodes;       ///< Number of nodes; "": the launcher has no such variable.
  const char* node;        ///< Number of this node; "": it is the rank.
};
// The first whose variables are set. mpirun comes before SLURM: in a job of SLURM it starts its daemons with
// srun, and their variables of SLURM reach the processes. MPICH has MPI_LOCALNRANKS; srun, which may set
// PMI_* too, has not. SLURM's are those of a step: a batch script without srun runs on the first node alone.
constexpr Launcher launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "", ""},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "", ""},
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"},
    {"PMI_SIZE", "PMI_RANK", "", "", ""},
};

std::optional<int> number(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  if (found == environment.end()) return std::nullopt;
  const auto parsed = base::parse_number<int>(found->second);
  if (!parsed || *parsed < 0)
    throw ConfigError(fmt::format("{}={}: it must be a whole number, 0 or more", name, found->second));
  return parsed;
}

int needed(const Environment& environment, const char* name, const Launcher& launcher) {
  if (const auto value = number(environment, name)) return *value;
  throw ConfigError(
      fmt::format("{} is set, but {} is not: the job is described in part; keep {}, or set --nnodes",
                  launcher.size, name, name));
}

void check_below(const char* name, int value, const Launcher& launcher, int size) {
  if (value >= size)
    throw ConfigError(fmt::format("{}={}: it must be from 0 to {}, because {} is {}", name, value, size - 1,
                                  launcher.size, size));
}

[[noreturn]] void refuse_list(std::string_view list, const char* why) {
  throw ConfigError(fmt::format("'{}' is not a list of nodes as SLURM writes it: {}", list, why));
}

/// "01-03" or "7" within the brackets of `list`.
void add_range(std::string_view prefix, std::string_view range, std::string_view suffix,
               std::string_view list, std::vector<std::string>& nodes) {
  const auto dash = range.find('-');
  const auto first = range.substr(0, dash);
  const auto last = dash == std::string_view::npos ? first : range.substr(dash + 1);
  const auto from = base::parse_number<int>(first), to = base::parse_number<int>(last);
  if (!from || !to || *from < 0 || *to < *from || *to - *from > 65535)
    refuse_list(list, "a range has no numbers");
  for (int i = *from; i <= *to; ++i)
    nodes.push_back(fmt::format("{}{:0{}}{}", prefix, i, static_cast<int>(first.size()), suffix));
}

/// Splits at the commas that are not within brackets.
std::vector<std::string_view> parts_of(std::string_view list) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= list.size();) {
    auto end = list.find_first_of(",[", begin);
    if (end != std::string_view::npos && list[end] == '[') {
      const auto close = list.find(']', end);
      if (close == std::string_view::npos) refuse_list(list, "'[' without ']'");
      end = list.find(',', close);
    }
    parts.push_back(list.substr(begin, end - begin));
    if (end == std::string_view::npos) break;
    begin = end + 1;
  }
  return parts;
}

std::string rendezvous_of_slurm(const Environment& environment) {
  const auto list = environment.find("SLURM_STEP_NODELIST");
  if (list == environment.end()) return "";
  const auto id = environment.find("SLURM_JOB_ID");  // Those of federations have 32 bits, without a sign.
  const auto job = id == environment.end() ? 0 : base::parse_number<std::uint64_t>(id->second).value_or(0);
  return fmt::format("{}:{}", nodes_in(list->second).front(), first_port + static_cast<int>(job % ports));
}

Job job_of(const Environment& environment, const Launcher& launcher, int size) {
  const int rank = needed(environment, launcher.rank, launcher);
  check_below(launcher.rank, rank, launcher, size);
  const bool is_slurm = launcher.nodes[0] != '\0';
  const bool crowded = is_slurm ? needed(environment, launcher.nodes, launcher) != size
                       : launcher.local_size[0] != '\0'
                           ? needed(environment, launcher.local_size, launcher) != 1
                           : false;
  if (crowded)
    throw ConfigError(fmt::format(
        "{}={}: the job has several processes on one node, but accelmgr spawn starts the ranks itself; "
        "start it once on each node (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), or set --nnodes",
        launcher.size, size));
  if (!is_slurm) return {size, rank, "", launcher.size};
  // Tasks may be dealt to nodes in another order than that of the list, whose first node is node 0.
  const int node = number(environment, launcher.node).value_or(rank);
  check_below(launcher.node, node, launcher, size);
  return {size, node, rendezvous_of_slurm(environment), launcher.size};
}

}  // namespace

std::vector<std::string> nodes_in(std::string_view list) {
  std::vector<std::string> nodes;
  for (const auto part : parts_of(list)) {
    const auto open = part.find('[');
    if (part.empty()) refuse_list(list, "a node has no name");
    if (open == std::string_view::npos) {
      nodes.emplace_back(part);
      continue;
    }
    const auto close = part.find(']');
    auto ranges = part.substr(open + 1, close - open - 1);
    for (std::size_t comma = 0; comma != std::string_view::npos; ranges.remove_prefix(comma + 1)) {
      comma = ranges.find(',');
      add_range(part.substr(0, open), ranges.substr(0, comma), part.substr(close + 1), list, nodes);
      if (comma == std::string_view::npos) break;
    }
  }
  return nodes;
}

std::optional<Job> job_of(const Environment& environment) {
  const auto has = [&](const char* name) { return name[0] == '\0' || environment.contains(name); };
  for (const auto& launcher : launchers) {
    if (!has(launcher.size) || !has(launcher.local_size)) continue;
    const int size = *number(environment, launcher.size);
    return size > 1 ? std::optional(job_of(environment, launcher, size)) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace accelmgr::agent
