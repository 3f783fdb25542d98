// The cases of the outcome table: every fault at every phase, under two policies; and what is seen of each.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/fault_point.hpp"
#include "faults/plan.hpp"

namespace accelmgr::test {

/// What is held back in the disturbed step, where its outcome depends on who comes first.
enum class Order {
  any,                       ///< Nothing: it does not.
  victim_votes_first,        ///< The other rank computes on when the fault has done its work.
  victim_votes_last,         ///< The victim computes on when the other rank has voted.
  source_is_waited_for,      ///< The source is read on when all ranks wait for its elements.
  checkpoint_strikes_first,  ///< The step begins when the fault has struck the checkpoint of the one before.
};

/// Where a fault strikes.
struct Place {
  std::string name;  ///< In the table.
  base::FaultPhase phase = base::FaultPhase::init;
  int rank = 1;  ///< The victim, or faults::manager_rank.
  bool accumulate = true;
  Order order = Order::any;
};

struct FaultCase {
  Place place;
  std::string fault;  ///< As faults/plan.hpp writes it; empty: none.
  LossPolicy policy = LossPolicy::fail;
};

/// What a step, or the start, came to.
struct StepSeen {
  std::string status;  ///< Of the result; or the type of the exception.
  bool counted = false;
  std::uint32_t tries = 0;
};

/// What is seen of a case.
struct CaseSeen {
  StepSeen disturbed;                     ///< The second step; the start, where that is refused.
  std::string ended;                      ///< Who ended, and how; "-": nobody.
  StepSeen next;                          ///< The third step; no status where there is none.
  double report_ms = 0;                   ///< From the call to the return of what was disturbed.
  std::array<std::uint64_t, 3> states{};  ///< Digests of all that a commit changes, after each of the steps.
};

/// In the order of a step. Each phase is there.
const std::vector<Place>& places();
void PrintTo(const Place& place, std::ostream* out);
/// The faults that make sense there.
std::vector<std::string> faults_at(const Place& place);
/// Under both policies.
std::vector<FaultCase> cases_at(const Place& place);
/// Three steps without a fault.
FaultCase undisturbed(const Place& place);

bool is_silent(const FaultCase& c);     ///< The victim lives on, and does nothing.
bool ends_process(const FaultCase& c);  ///< The victim ends by itself.
bool is_committed(const FaultCase& c);  ///< It strikes after the commit.

std::string policy_name(LossPolicy policy);
/// "forward, kill, fail"
std::string name_of(const FaultCase& c);
/// The row of the table, without the time.
std::string row_of(const FaultCase& c, const CaseSeen& seen);

}  // namespace accelmgr::test
