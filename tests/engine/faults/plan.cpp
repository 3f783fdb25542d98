#include "engine/faults/plan.hpp"

#include <utility>

namespace accelmgr::faults {
namespace {

bool concerns(const Fault& fault, int rank, std::uint32_t generation) {
  const bool this_rank = fault.rank ? *fault.rank == rank : rank != manager_rank;
  return this_rank && (!fault.generation || *fault.generation == generation);
}

double uniform(data::Random& random) { return static_cast<double>(random.next() >> 11) * 0x1p-53; }

}  // namespace

Plan::Plan(std::vector<Fault> faults, int rank, std::uint32_t generation) {
  for (auto& fault : faults) {
    if (!concerns(fault, rank, generation)) continue;
    const data::Random random(fault.seed, static_cast<std::uint64_t>(rank), generation);
    watched_.push_back({.fault = std::move(fault), .random = random});
  }
}

bool Plan::Watched::is_due(base::FaultPhase at, std::uint64_t in_step) {
  if (fault.phase && *fault.phase != at) return false;
  if (fault.step && *fault.step != in_step) return false;
  if (fault.probability) return uniform(random) < *fault.probability;
  if (in_step != step && fault.rank != manager_rank) {
    step = in_step;
    reached = 0;
  }
  return ++reached == fault.occurrence;
}

std::vector<const Fault*> Plan::reach(base::FaultPhase phase, std::uint64_t step) {
  std::vector<const Fault*> due;
  const std::lock_guard lock(mutex_);
  for (auto& watched : watched_)
    if (watched.is_due(phase, step)) due.push_back(&watched.fault);
  return due;
}

}  // namespace accelmgr::faults
