// Registers the models and data sources that are written in Python, under the kind "python".
#pragma once

namespace accelmgr::python {

inline constexpr const char* kind = "python";

void register_replicas();
void register_sources();

}  // namespace accelmgr::python
