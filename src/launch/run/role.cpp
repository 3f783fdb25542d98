#include <fcntl.h>

#include <atomic>
#include <cstring>

#include "base/parse_number.hpp"
#include "launch/run/child.hpp"
#include "launch/run/spawner.hpp"
#include "launch/run/zygote.hpp"

namespace accelmgr::launch {
namespace {

std::atomic<bool> role_taken{false};

[[noreturn]] void run_executed_fork_server() noexcept {
  for (const int fd : {fork_server_socket, fork_server_creator}) fcntl(fd, F_SETFD, FD_CLOEXEC);
  become_fork_server(base::UniqueFd(fork_server_socket), base::UniqueFd(fork_server_creator));
}

}  // namespace

void take_role(int argc, char** argv) {
  role_taken = true;
  if (argc == 2 && std::strcmp(argv[1], zygote_argument) == 0) run_zygote();
  if (argc == 2 && std::strcmp(argv[1], fork_server_argument) == 0) run_executed_fork_server();
  if (argc != 4 || std::strcmp(argv[1], child_argument) != 0) return;
  const auto socket = base::parse_number<int>(argv[2]), rank = base::parse_number<int>(argv[3]);
  if (socket && rank) run_executed_child(*socket, *rank);
}

void let_be_executed() noexcept { role_taken = true; }

bool can_be_executed() noexcept { return role_taken; }

}  // namespace accelmgr::launch
