// The only door to the gloo backend: communicators over several hosts. gloo itself is a plug-in, a shared
// library of its own that is loaded so that its symbols mix with nobody else's (torch exports the same ones).
#pragma once

#include <memory>
#include <string>

#include "accelmgr/communicator.hpp"
#include "collective/store.hpp"

namespace accelmgr::collective::gloo {

/// Empty when the plug-in can be used, else why not: what was looked for, and where.
std::string unavailable_because();

struct Options {
  double timeout_s = 300;  ///< Of connecting, and of every call that does not say otherwise.
  std::string interface;   ///< Network interface ("eth0"); empty: as local_address() in address.hpp finds it.
};

/// All `size` ranks in one flat gloo context. Blocks until all have called it with the same `name`. Throws
/// UsageError when the plug-in is missing, CollectiveError{timeout} which names the ranks that did not come.
/// The store must outlive the communicator and its groups: these meet in it.
std::shared_ptr<Communicator> connect(Store& store, const std::string& name, int rank, int size,
                                      const Options& options = {});

}  // namespace accelmgr::collective::gloo
