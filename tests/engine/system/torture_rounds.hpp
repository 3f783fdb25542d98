// The torture test for hours: one round after the other, each with another seed.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::test {

/// The argument that asks for rounds; MINUTES SEED FOLDER follow. The logs of failed rounds stay in the
/// folder.
inline constexpr const char* rounds_argument = "--torture";
/// The same for rounds of hosts of a service.
inline constexpr const char* service_rounds_argument = "--torture-service";

/// Runs rounds with seed, seed + 1, ... until the time is over, but at least one. Manager and fork server are
/// killed more often than in the test. Each round prints a JSON object on one line. Returns the exit code: 1
/// if a round failed.
int torture_in_rounds(const std::vector<std::string>& arguments);
int service_torture_in_rounds(const std::vector<std::string>& arguments);

}  // namespace accelmgr::test
