// The control groups of this process, of both versions.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace accelmgr::ipc {

/// Calls `visit` with the folder of each group that limits this process by `controller` ("cpu"), and whether
/// it is one of version 2: its own groups and those that they are in, up to that of the mount. In a container
/// the path of the own group may be that of the host machine, which does not exist here. `root` is "/".
void visit_groups(const std::filesystem::path& root, const std::string& controller,
                  const std::function<void(const std::filesystem::path& folder, bool unified)>& visit);

}  // namespace accelmgr::ipc
