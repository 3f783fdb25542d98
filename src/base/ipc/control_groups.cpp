#include "base/ipc/control_groups.hpp"

#include <sstream>

#include "base/ipc/proc_file.hpp"

namespace accelmgr::ipc {

void visit_groups(const std::filesystem::path& root, const std::string& controller,
                  const std::function<void(const std::filesystem::path& folder, bool unified)>& visit) {
  std::istringstream groups(read_proc(root / "proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(groups, line);) {  // "0::/a/b", or "4:cpu,cpuacct:/a/b"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    const auto mount = root / "sys/fs/cgroup" / controllers;
    for (auto group = std::filesystem::path(line.substr(second + 1)).relative_path();;
         group = group.parent_path()) {
      visit(mount / group, unified);
      if (group.empty()) break;
    }
  }
}

}  // namespace accelmgr::ipc
