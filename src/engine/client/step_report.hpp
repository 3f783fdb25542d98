// What the host says of a step: its result, where ranks stand while it waits, and the losses that ended it.
// Reads the session and changes nothing.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/step_result.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::client {

/// The phase of each rank, and since when this process has seen it there.
class Standings {
 public:
  void look(const session::Session& session) noexcept;
  std::int64_t since_ns(int rank) const noexcept { return of_[static_cast<std::size_t>(rank)].since_ns; }

 private:
  struct Standing {
    session::Phase phase = session::Phase::none;
    std::int64_t since_ns = 0;
  };
  std::array<Standing, session::max_ranks> of_{};
};

/// "rank 0 in phase forward for 1.9 s, rank 1 in phase data for 2.0 s (the data source 'text' has given ...)"
/// Without `standings` it says no times; they look once more, so that all ranks have one.
std::string phases_of(const session::Session& session, const Config& config, session::RankMask ranks,
                      Standings* standings = nullptr);

/// Fills in what the session says of the last attempt. If it has not counted, only step and version. Scalars
/// are means as the loss is, except `total_name`, which is a sum.
void fill(StepResult& result, const session::Session& session, const std::string& total_name);

/// The last losses, three at most, the oldest first.
std::vector<Failure> last_causes(const session::Session& session);
/// "runner 1 (pid 7) killed by signal 9 (KILL) in phase forward of attempt 2: what() said; then runner 1 ..."
std::string text_of(const std::vector<Failure>& causes);

}  // namespace accelmgr::client
