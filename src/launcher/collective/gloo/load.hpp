// Finds and loads gloo, which connects hosts. gloo is a plug-in: a shared library of its own, so that its
// symbols do not mix with those of torch, which exports the same ones.
#pragma once

#include <string>

namespace accelmgr::collective::gloo {

struct Plugin;

/// Returns an empty string when the plug-in can be used, otherwise the reason: what was looked for, and
/// where.
std::string unavailable_because();

/// Loads the plug-in at the first call in a process. Throws UsageError with the text of
/// unavailable_because().
const Plugin& plugin();

}  // namespace accelmgr::collective::gloo
