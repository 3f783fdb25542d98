// A job that SLURM or mpirun has started on several nodes, with one `accelmgr spawn` on each.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::agent {

struct Job {
  int nnodes = 1;
  int node_rank = 0;
  std::string rendezvous;  ///< HOST:PORT on the first node; empty: the launcher does not tell the nodes.
  std::string variable;    ///< The variable that says how many nodes there are.

  bool operator==(const Job&) const = default;
};

/// The job that the variables of srun, Open MPI, MPICH or Intel MPI describe; nullopt if there is none, or if
/// it has one process. Throws ConfigError, which names the variable, if the launcher has started several
/// processes on a node (`accelmgr spawn` starts the ranks itself), or if a variable is missing or out of
/// range.
std::optional<Job> job_of(const std::map<std::string, std::string>& environment);

/// The nodes of a list as SLURM writes it: "node[01-03,7],login" is node01, node02, node03, node7, login.
/// Throws ConfigError for another text.
std::vector<std::string> nodes_in(std::string_view list);

}  // namespace accelmgr::agent
