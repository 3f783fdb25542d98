// The cases of the outcome table: every fault at every phase under two policies, and what is seen of each
// case.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/fault_point.hpp"
#include "engine/faults/plan.hpp"
#include "engine/system/stage.hpp"

namespace accelmgr::test {

/// What the test holds back in the disturbed step. Without that, the outcome would depend on which process is
/// first.
enum class Order {
  any,                       ///< Nothing: the outcome does not depend on the order.
  victim_votes_first,        ///< The other rank waits until the fault has struck.
  victim_votes_last,         ///< The victim waits until the other rank has voted.
  source_is_waited_for,      ///< The source waits until all ranks wait for its elements.
  checkpoint_strikes_first,  ///< The step waits until the fault has struck the checkpoint of the step before.
};

/// A place where a fault strikes.
struct Place {
  std::string name;  ///< The name in the table.
  base::FaultPhase phase = base::FaultPhase::init;
  int rank = 1;  ///< The rank that is struck, or faults::manager_rank.
  bool accumulate = true;
  bool updates = false;  ///< The steps are inner steps.
  Order order = Order::any;
};

struct FaultCase {
  Place place;
  std::string fault;  ///< In the syntax of engine/faults/plan.hpp; empty: no fault.
  LossPolicy policy = LossPolicy::fail;
  const char* model = staged;
};

/// The outcome of a step, or of the start.
struct StepSeen {
  std::string status;  ///< The status of the result, or the type of the exception.
  bool counted = false;
  std::uint32_t tries = 0;
};

/// What is seen of a case.
struct CaseSeen {
  StepSeen disturbed;                     ///< The second step, or the start if that is refused.
  std::string ended;                      ///< Which processes ended, and how; "-": none.
  StepSeen next;                          ///< The third step; its status is empty if there was no third step.
  double report_ms = 0;                   ///< From the call of the disturbed step or start to its return.
  std::array<std::uint64_t, 3> states{};  ///< Digests of all that a commit changes, after each step.
};

/// All places, in the order of a step. Each phase has one.
const std::vector<Place>& places();
void PrintTo(const Place& place, std::ostream* out);
/// The faults that make sense at a place.
std::vector<std::string> faults_at(const Place& place);
/// All cases of a place, under both policies.
std::vector<FaultCase> cases_at(const Place& place);
/// The same three steps without a fault.
FaultCase undisturbed(const Place& place);

bool is_silent(const FaultCase& c);     ///< The victim lives on but does nothing.
bool ends_process(const FaultCase& c);  ///< The fault ends the victim.
bool is_committed(const FaultCase& c);  ///< The fault strikes after the commit.

std::string policy_name(LossPolicy policy);
/// "forward, kill, fail"
std::string name_of(const FaultCase& c);
/// The row of the outcome table, without the time.
std::string row_of(const FaultCase& c, const CaseSeen& seen);

}  // namespace accelmgr::test
