// Models that move their parameters in forward() and put them back, as adversarial training does. Runners map
// the shared parameters read-only. At the first write in a micro-batch the runner gets a private copy of the
// pages that it writes; after the micro-batch it reads the shared ones again. So nobody else sees a move. A
// move that was not taken back would be lost: it is an error.
#pragma once

#include <string>

#include "engine/session/manifest.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::runner {

/// Installs handlers for SIGSEGV and SIGBUS. Any fault outside the parameters has its default action. One in
/// a process.
/// Requires: `runner` and `manifest` stay valid until the process ends.
class WriteGuard {
 public:
  /// Guards the master parameters.
  WriteGuard(const session::RunnerView& runner, const session::Manifest& manifest);

  /// Guards another copy of the parameters, too, which has the master's layout: the file `fd`, mapped
  /// read-only at `begin`. Both must stay until the process ends. Call it once.
  void add(std::byte* begin, int fd);

  /// Call it before an attempt: drops changes that an earlier attempt left in the parameters.
  void begin();
  /// Call it after a micro-batch: drops its changes. Returns the name of a parameter that was not put back,
  /// or nothing. A change as small as rounding does not count, except of a frozen parameter.
  [[nodiscard]] std::string check();

 private:
  const session::Manifest& manifest_;
};

}  // namespace accelmgr::runner
