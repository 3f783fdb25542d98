// The state of a session as metrics, in the text format of Prometheus
// (https://prometheus.io/docs/instrumenting/exposition_formats/).
#pragma once

#include <string>

#include "engine/service/service.hpp"

namespace accelmgr::service {

inline constexpr const char* metrics_type = "text/plain; version=0.0.4; charset=utf-8";

/// What the session's memory says now. There are no counters of the service's own, and no step waits for it.
std::string metrics_of(Service& service);

}  // namespace accelmgr::service
