#include <fcntl.h>

#include <atomic>
#include <string_view>

#include "base/parse_number.hpp"
#include "launch/run/child.hpp"
#include "launch/run/spawner.hpp"
#include "launch/run/zygote.hpp"

namespace accelmgr::launch {
namespace {

std::atomic<bool> role_taken{false};

}  // namespace

void take_role(int argc, char** argv) {
  role_taken = true;
  const std::string_view role = argc > 1 ? argv[1] : "";
  if (argc == 2 && (role == zygote_argument || role == fork_server_argument)) {
    for (const int fd : {role_socket, role_creator}) fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (role == zygote_argument) run_zygote();
    become_fork_server(base::UniqueFd(role_socket), base::UniqueFd(role_creator));
  }
  if (argc != 4 || role != child_argument) return;
  const auto socket = base::parse_number<int>(argv[2]), rank = base::parse_number<int>(argv[3]);
  if (socket && rank) run_executed_child(*socket, *rank);
}

void let_be_executed() noexcept { role_taken = true; }

bool can_be_executed() noexcept { return role_taken; }

}  // namespace accelmgr::launch
