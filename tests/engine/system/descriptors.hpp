// The descriptors that an executed program has inherited.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/types.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <system_error>

#include "base/ipc/proc_file.hpp"

namespace accelmgr::test {

/// By number: what each is, as /proc names it.
using Descriptors = std::map<int, std::string>;

/// Those of a program that was executed. Its loader and its libraries open files that are close-on-exec:
/// those are its own.
inline Descriptors inherited_by(pid_t pid) {
  Descriptors found;
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid))) {
    const auto number = entry.path().filename().string();
    const auto info = ipc::read_proc(fmt::format("/proc/{}/fdinfo/{}", pid, number)).value_or("");
    constexpr std::string_view flags = "flags:";
    const auto at = info.find(flags);
    if (at == std::string::npos) continue;
    if ((std::stol(info.substr(at + flags.size()), nullptr, 8) & O_CLOEXEC) != 0) continue;
    std::error_code closed;
    const auto what = std::filesystem::read_symlink(entry.path(), closed);
    if (!closed) found[std::stoi(number)] = what;
  }
  return found;
}

inline Descriptors standard_streams(Descriptors all) {
  std::erase_if(all, [](const auto& entry) { return entry.first > STDERR_FILENO; });
  return all;
}

}  // namespace accelmgr::test
