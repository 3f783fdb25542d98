#include "job_environment.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "launch/parse_number.hpp"

namespace accelmgr::program {
namespace {

using Environment = std::map<std::string, std::string>;

constexpr int first_port = 29400;  // That of torchrun's rendezvous.
constexpr int ports = 1000;        // Jobs that share a host have different ports, mostly.

struct Launcher {
  const char* size;        ///< Of the job; "" in what follows: the launcher has no such variable.
  const char* rank;        ///< Of this process.
  const char* local_size;  ///< Processes on this host.
  const char* hosts;       ///< Number of hosts.
};
// SLURM's are those of a step: a batch script without srun runs on the first host alone.
constexpr Launcher launchers[] = {
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "", "SLURM_STEP_NUM_NODES"},
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", ""},
};

std::optional<int> number(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  if (found == environment.end()) return std::nullopt;
  const auto parsed = launch::parse_number<int>(found->second);
  if (!parsed || *parsed < 0)
    throw ConfigError(fmt::format("{}={}: it must be a whole number", name, found->second));
  return parsed;
}

[[noreturn]] void refuse_list(std::string_view list, const char* why) {
  throw ConfigError(fmt::format("'{}' is not a list of hosts as SLURM writes it: {}", list, why));
}

/// "01-03" or "7" within the brackets of `list`.
void add_range(std::string_view prefix, std::string_view range, std::string_view suffix,
               std::string_view list, std::vector<std::string>& hosts) {
  const auto dash = range.find('-');
  const auto first = range.substr(0, dash);
  const auto last = dash == std::string_view::npos ? first : range.substr(dash + 1);
  const auto from = launch::parse_number<int>(first), to = launch::parse_number<int>(last);
  if (!from || !to || *from < 0 || *to < *from || *to - *from > 65535)
    refuse_list(list, "a range has no numbers");
  for (int i = *from; i <= *to; ++i)
    hosts.push_back(fmt::format("{}{:0{}}{}", prefix, i, static_cast<int>(first.size()), suffix));
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
  const auto job = id == environment.end() ? 0 : launch::parse_number<std::uint64_t>(id->second).value_or(0);
  return fmt::format("{}:{}", hosts_in(list->second).front(), first_port + static_cast<int>(job % ports));
}

}  // namespace

std::vector<std::string> hosts_in(std::string_view list) {
  std::vector<std::string> hosts;
  for (const auto part : parts_of(list)) {
    const auto open = part.find('[');
    if (part.empty()) refuse_list(list, "a host has no name");
    if (open == std::string_view::npos) {
      hosts.emplace_back(part);
      continue;
    }
    const auto close = part.find(']');
    auto ranges = part.substr(open + 1, close - open - 1);
    for (std::size_t comma = 0; comma != std::string_view::npos; ranges.remove_prefix(comma + 1)) {
      comma = ranges.find(',');
      add_range(part.substr(0, open), ranges.substr(0, comma), part.substr(close + 1), list, hosts);
      if (comma == std::string_view::npos) break;
    }
  }
  return hosts;
}

std::optional<Job> job_of(const Environment& environment) {
  for (const auto& launcher : launchers) {
    const auto size = number(environment, launcher.size);
    const auto rank = number(environment, launcher.rank);
    if (!size || !rank) continue;
    if (*size <= 1) return std::nullopt;
    const bool is_slurm = launcher.hosts[0] != '\0';
    const auto hosts = is_slurm ? number(environment, launcher.hosts) : std::nullopt;
    const auto here = is_slurm ? std::nullopt : number(environment, launcher.local_size);
    if ((hosts && *hosts != *size) || (here && *here != 1))
      throw ConfigError(fmt::format(
          "{}={}: the job has several processes on one host, but accelmgr spawn starts the ranks itself; "
          "start it once on each "
          "host (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), or set --nnodes",
          launcher.size, *size));
    return Job{*size, *rank, is_slurm ? rendezvous_of_slurm(environment) : "", launcher.size};
  }
  return std::nullopt;
}

}  // namespace accelmgr::program
