// The first call of an embedding program.
#pragma once

namespace accelmgr {

/// Call it first in main(), after registering models, data sources and functions and before any thread is
/// started: the manager process, and processes started by launch::spawn(), are this program run again, and
/// branch off here (it does not return then). Otherwise it returns at once. Standard streams that are closed
/// are opened on /dev/null: nothing else may get their numbers. Throws UsageError when called a second time,
/// or when the process has threads already.
void init(int argc, char** argv);

}  // namespace accelmgr
