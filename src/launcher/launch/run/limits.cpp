#include "launcher/launch/run/limits.hpp"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>

#include "base/ipc/proc_file.hpp"

namespace accelmgr::launch {
namespace {

std::string soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur);
}

/// pids.max of the process's own control group. The limit of a parent group may be lower.
std::string control_group_limit() {
  const auto groups = ipc::read_proc("/proc/self/cgroup").value_or("");
  const auto unified = groups.find("0::");
  if (unified == std::string::npos) return "unknown";
  const auto path = groups.substr(unified + 3, groups.find('\n', unified) - unified - 3);
  auto text = ipc::read_proc("/sys/fs/cgroup" + path + "/pids.max").value_or("none");
  text.erase(text.find_last_not_of('\n') + 1);
  return text;
}

std::string limit_of(int error) {
  if (error == EAGAIN)
    return fmt::format(
        "; processes and threads of this user are limited by RLIMIT_NPROC ({}), those of the control "
        "group by pids.max ({})",
        soft_limit(RLIMIT_NPROC), control_group_limit());
  if (error == EMFILE)
    return fmt::format("; a process may have at most RLIMIT_NOFILE ({}) descriptors open",
                       soft_limit(RLIMIT_NOFILE));
  if (error == ENFILE) return "; all processes together may have at most /proc/sys/fs/file-max files open";
  return "";
}

}  // namespace

SystemError not_forked(int rank, int error) {
  return SystemError(fmt::format("starting rank {}{}", rank, limit_of(error)), error);
}

SystemError with_limit(const SystemError& error) {
  const auto limit = limit_of(error.code());
  if (limit.empty()) return error;
  // SystemError appends the text of the code. Remove it here, so that it does not appear twice.
  std::string text = error.what();
  const std::string meaning = SystemError("", error.code()).what();
  if (text.ends_with(meaning)) text.resize(text.size() - meaning.size());
  return SystemError(text + limit, error.code());
}

}  // namespace accelmgr::launch
