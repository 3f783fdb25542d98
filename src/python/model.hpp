// A model and a data source that are written in Python, for the processes of a manager.
#pragma once

namespace accelmgr::python {

/// The kind of model and of data that stands for what the host has passed on.
inline constexpr const char* kind = "python";

/// Registers both; before the process takes its role.
void register_kind();

}  // namespace accelmgr::python
