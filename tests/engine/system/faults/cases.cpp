#include "cases.hpp"

#include <fmt/format.h>

#include <ostream>

namespace accelmgr::test {

using base::FaultPhase;

const std::vector<Place>& places() {
  constexpr int manager = faults::manager_rank;
  // publish and published strike the rank that writes the result's copies.
  static const std::vector<Place> all{
      {.name = "init", .phase = FaultPhase::init},
      {.name = "load_parameters", .phase = FaultPhase::load_parameters},
      {.name = "data", .phase = FaultPhase::data},
      {.name = "data_manager",
       .phase = FaultPhase::data,
       .rank = manager,
       .order = Order::source_is_waited_for},
      {.name = "forward", .phase = FaultPhase::forward},
      {.name = "backward", .phase = FaultPhase::backward},
      {.name = "gradient_capture", .phase = FaultPhase::gradient_capture},
      {.name = "vote", .phase = FaultPhase::vote},
      {.name = "voted_first", .phase = FaultPhase::voted, .order = Order::victim_votes_first},
      {.name = "voted_last", .phase = FaultPhase::voted, .order = Order::victim_votes_last},
      {.name = "undo_saved", .phase = FaultPhase::undo_saved},
      {.name = "in_flight", .phase = FaultPhase::in_flight},
      {.name = "reduced", .phase = FaultPhase::reduced},
      {.name = "chunk", .phase = FaultPhase::chunk},
      {.name = "reduced_overwrite", .phase = FaultPhase::reduced, .accumulate = false},
      {.name = "chunk_overwrite", .phase = FaultPhase::chunk, .accumulate = false},
      {.name = "update_saved", .phase = FaultPhase::update_saved, .updates = true},
      {.name = "update_in_flight", .phase = FaultPhase::update_in_flight, .updates = true},
      {.name = "updated", .phase = FaultPhase::updated, .updates = true},
      {.name = "publish", .phase = FaultPhase::publish, .rank = 0},
      {.name = "published", .phase = FaultPhase::published, .rank = 0},
      {.name = "close", .phase = FaultPhase::close},
      {.name = "checkpoint",
       .phase = FaultPhase::checkpoint,
       .rank = manager,
       .order = Order::checkpoint_strikes_first},
  };
  return all;
}

void PrintTo(const Place& place, std::ostream* out) { *out << place.name; }

std::vector<std::string> faults_at(const Place& place) {
  std::vector<std::string> faults{"kill", "stop", "exit:3", "exception", "hang", "slow:200"};
  if (place.phase == FaultPhase::forward) faults.emplace_back("nan");
  return faults;
}

std::vector<FaultCase> cases_at(const Place& place) {
  std::vector<FaultCase> cases;
  for (const auto policy : {LossPolicy::fail, LossPolicy::restart})
    for (const auto& fault : faults_at(place)) cases.push_back({place, fault, policy});
  return cases;
}

FaultCase undisturbed(const Place& place) { return {.place = place, .fault = ""}; }

bool is_silent(const FaultCase& c) { return c.fault == "stop" || c.fault == "hang"; }

bool ends_process(const FaultCase& c) {
  // The manager's threads catch exceptions of the code that they call.
  const bool thrown = c.fault == "exception" && c.place.rank != faults::manager_rank;
  return c.fault == "kill" || c.fault == "exit:3" || thrown;
}

bool is_committed(const FaultCase& c) {
  const auto phase = c.place.phase;
  return (phase > FaultPhase::voted && phase < FaultPhase::checkpoint) ||
         c.place.order == Order::victim_votes_last;
}

std::string policy_name(LossPolicy policy) { return policy == LossPolicy::fail ? "fail" : "restart"; }

std::string name_of(const FaultCase& c) {
  if (c.fault.empty()) return fmt::format("{}, undisturbed", c.place.name);
  return fmt::format("{}, {}, {}", c.place.name, c.fault, policy_name(c.policy));
}

std::string row_of(const FaultCase& c, const CaseSeen& seen) {
  const auto columns = [](const StepSeen& step) {
    if (step.status.empty()) return std::string("- | - | -");
    return fmt::format("{} | {} | {}", step.status, step.counted ? "yes" : "no", step.tries);
  };
  return fmt::format("| {} | {} | {} | {} | {} | {} |", c.place.name, c.fault, policy_name(c.policy),
                     columns(seen.disturbed), seen.ended, columns(seen.next));
}

}  // namespace accelmgr::test
