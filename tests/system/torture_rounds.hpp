// The torture test for hours: one round after the other, each with another seed.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::test {

/// How this program is called for it: MINUTES SEED FOLDER follow. Logs of rounds that fail stay in the
/// folder.
inline constexpr const char* rounds_argument = "--torture";

/// Rounds of seed, seed + 1, ... until the time is over; at least one. Manager and launcher are killed more
/// often than in the test. Each round prints a JSON object in a line of its own. Returns the exit code: 1 if
/// one failed.
int torture_in_rounds(const std::vector<std::string>& arguments);

}  // namespace accelmgr::test
