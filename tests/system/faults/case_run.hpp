// Runs a case of the outcome table.
#pragma once

#include <optional>
#include <vector>

#include "cases.hpp"

namespace accelmgr::test {

/// Runs it with this process as the host. Fails the test when a wait passes its deadline, or anything is left
/// of it: a process, a descriptor, a mapping, something in /dev/shm, half a checkpoint.
CaseSeen run_case(const FaultCase& c);

/// Runs each in a forked process, `at_once` at a time. Nothing is seen of a case in which that process fails
/// the test. Call it in a process of one thread.
std::vector<std::optional<CaseSeen>> run_cases(const std::vector<FaultCase>& cases, int at_once);

}  // namespace accelmgr::test
