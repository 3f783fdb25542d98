// The page that a service shows in a browser. The build makes it from the files of this folder (embed.cmake).
#pragma once

#include <string_view>

namespace accelmgr::service {

/// It has no data and no secret: what it shows, its script asks for, with the token of the person who reads
/// it.
extern const std::string_view dashboard_page;
/// The Content-Security-Policy under which it works. Only the style and the script that are in the page run,
/// and they reach this service alone.
extern const std::string_view dashboard_policy;

}  // namespace accelmgr::service
