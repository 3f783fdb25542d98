// What a service answers to each request.
#pragma once

#include "engine/service/request.hpp"
#include "engine/service/service.hpp"

namespace accelmgr::service {

/// Serves `request`, or throws Problem. Does not block: `respond` may be called later.
void handle(Service& service, Request request, const Respond& respond);

}  // namespace accelmgr::service
