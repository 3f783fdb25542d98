// Which requests of web pages a service refuses. A browser sends what any page asks it to, from this machine
// and as this user: to a service's TCP port, and to a Unix socket that somebody forwards to one.
//
//   - A request that changes something and comes from a page of another site. The browser says so:
//     https://www.w3.org/TR/fetch-metadata/#sec-fetch-site-header, or the Origin of
//     https://fetch.spec.whatwg.org/#origin-header where it does not send that. Other programs send neither.
//   - Without a token, any request whose Host is a name of the internet. Its owner may let it point to this
//     machine after the browser has loaded the page from his own (DNS rebinding), and browsers take the
//     page for one of this service then. Such a page does not know the token of a TCP port.
#pragma once

#include "engine/service/request.hpp"

namespace accelmgr::service {

/// Throws Problem for such a request.
void check_origin(const Request& request);

}  // namespace accelmgr::service
