// What all communicators check before they do anything, and the errors that they have in common.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/communicator.hpp"

namespace accelmgr::collective {

/// "rank 3", "ranks 1, 4".
std::string names_of(const std::vector<int>& ranks);

/// Throws UsageError unless `rank` is a rank of a communicator of `size`. `what` names its role in the error.
void check_member(int rank, int size, const char* what);
/// Throws UsageError unless `self` may call Communicator::group() with these ranks.
void check_group(std::span<const int> ranks, int self, int size);

/// For a call in a forked child of the process that made the communicator.
UsageError of_another_process(std::string_view call);

/// The error of a call in which `ranks` are missing: "CALL: rank 3 did not arrive within 5 s", "CALL: rank 3
/// has died or cannot be reached", "CALL: rank 3 did not complete an earlier call; ...".
CollectiveError missing_ranks(CollectiveError::Cause cause, std::string_view call, std::vector<int> ranks,
                              double timeout_s);

}  // namespace accelmgr::collective
