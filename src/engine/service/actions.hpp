// The requests that change something, as handle() calls them: they serve a request, or throw Problem.
#pragma once

#include "engine/service/request.hpp"
#include "engine/service/service.hpp"

namespace accelmgr::service {

/// Throws Problem unless a step could be made.
void check_ready(Service& service);

void step(Service& service, const Request& request, const Respond& respond);
/// Ends the steps for which nobody waits, and answers when they are over.
void cancel(Service& service, const Request& request, const Respond& respond);
void zero_grad(Service& service, const Request& request, const Respond& respond);
void resize(Service& service, const Request& request, const Respond& respond);
void restart(Service& service, const Request& request, const Respond& respond);
void checkpoint(Service& service, const Request& request, const Respond& respond);
void stop(Service& service, const Request& request, const Respond& respond);
/// Gives the lease to the process that asks, with the socket on which it finds the session.
void attach(Service& service, const Request& request, const Respond& respond);
/// Gives the process that asks the session's memory, for reading alone. The service keeps nothing of it.
void observe(Service& service, const Request& request, const Respond& respond);

}  // namespace accelmgr::service
