// Runs a body on all ranks of a world, as threads or processes, and brings back what went wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "contract.hpp"

namespace accelmgr::collective::contract {

/// Of every call of the communicators: more than any takes on a loaded machine.
inline constexpr double world_timeout_s = 20;

/// Failed assertions, exceptions and unexpected ends: "rank 1: file:12: ...". Every process has ended on
/// return. A rank that ended by Meeting::die() is none.
std::vector<std::string> run_world(const Backend& backend, Start start, int size, const Promise& promise);

/// As threads: any function will do.
std::vector<std::string> run_threads(const Backend& backend, int size, const std::function<void(Rank&)>& body,
                                     double timeout_s = world_timeout_s);

inline constexpr const char* role_argument = "--rank-of-a-world";

/// main() of an executed rank.
int play_rank(const std::vector<std::string>& arguments);

}  // namespace accelmgr::collective::contract
