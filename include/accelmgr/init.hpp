// The first call of an embedding program.
#pragma once

namespace accelmgr {

/// Call it first in main(). The manager process and the processes of launch::spawn() are this program
/// executed again; in them init() does not return. In the host it returns at once. Opens closed standard
/// streams on /dev/null, so that no other file gets their descriptors. Throws UsageError when called a second
/// time, or when the process has other threads already.
/// Requires: models, data sources and functions are registered; no thread was started.
void init(int argc, char** argv);

}  // namespace accelmgr
