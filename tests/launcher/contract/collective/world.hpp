// Runs a body on all ranks of a world, as threads or processes, and returns what went wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "contract.hpp"

namespace accelmgr::collective::contract {

/// The timeout of every call of the communicators: longer than any takes on a loaded machine.
inline constexpr double world_timeout_s = 60;

/// Runs the promise on every rank. Returns failed assertions, exceptions and unexpected ends, as "rank 1:
/// file:12: ...". An end by Meeting::die() is no failure. Every process has ended on return.
std::vector<std::string> run_world(const Backend& backend, Start start, int size, const Promise& promise);

/// Like run_world(), with threads as ranks. `body` may be any function.
std::vector<std::string> run_threads(const Backend& backend, int size, const std::function<void(Rank&)>& body,
                                     double timeout_s = world_timeout_s);

inline constexpr const char* role_argument = "--rank-of-a-world";

/// main() of an executed rank.
int play_rank(const std::vector<std::string>& arguments);

}  // namespace accelmgr::collective::contract
