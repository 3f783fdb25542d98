// Runs the cases of the outcome table.
#pragma once

#include <optional>
#include <vector>

#include "cases.hpp"

namespace accelmgr::test {

/// Runs a case with this process as the host. Fails the test when a wait passes its deadline, or when the
/// case leaves anything: a process, a descriptor, a mapping, something in /dev/shm, or half a checkpoint.
CaseSeen run_case(const FaultCase& c);

/// Runs each case in a forked process, `at_once` at a time. The result of a case is empty if its process
/// fails the test. The calling process must have one thread.
std::vector<std::optional<CaseSeen>> run_cases(const std::vector<FaultCase>& cases, int at_once);

}  // namespace accelmgr::test
