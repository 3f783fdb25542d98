// The control groups of this process, of both versions.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace accelmgr::ipc {

/// Calls `visit` with the folder of each group that limits this process by `controller` ("cpu"), and whether
/// the group is one of version 2. These are the groups of this process and the groups above them, up to the
/// mount. In a container the path of a group may be that of the machine outside, which does not exist here.
/// `root` is "/".
void visit_groups(const std::filesystem::path& root, const std::string& controller,
                  const std::function<void(const std::filesystem::path& folder, bool unified)>& visit);

}  // namespace accelmgr::ipc
