#include "accelmgr/init.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/roles.hpp"
#include "base/ipc/zygote.hpp"
#include "base/log.hpp"
#include "engine/manager/fork_servers.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/manager/manager.hpp"
#include "engine/manager/role.hpp"

namespace accelmgr {
namespace {

std::atomic<bool> called{false};

/// If one of them were closed, the next socket would get its number, and every print would go there.
void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    if (open("/dev/null", O_RDWR) < 0)
      throw SystemError("opening /dev/null", errno);  // open() takes the lowest free number: `fd`.
  }
}

manager::Interpreter& the_interpreter() {
  static manager::Interpreter interpreter;
  return interpreter;
}

std::vector<std::function<void()>>& beginnings() {
  static std::vector<std::function<void()>> all;
  return all;
}

const ipc::RegisteredForkedRole forked_manager(manager::server_role, [](base::UniqueFd socket,
                                                                        base::UniqueFd host_pidfd) {
  manager::interpreter().forked([&] { manager::run(std::move(socket), std::move(host_pidfd)); });
});
const ipc::RegisteredRole executed_manager(manager::role_argument,
                                           [](std::span<const std::string_view> arguments) {
                                             if (!arguments.empty()) return;
                                             ipc::keep_role_descriptors();
                                             manager::run(base::UniqueFd(manager::role_socket));
                                           });
const ipc::RegisteredRole executed_fork_server(manager::fork_server_argument,
                                               [](std::span<const std::string_view> arguments) {
                                                 if (!arguments.empty()) return;
                                                 ipc::keep_role_descriptors();
                                                 manager::run_fork_server(
                                                     base::UniqueFd(manager::role_socket));
                                               });

}  // namespace

void init(int argc, char** argv) {
  if (called.exchange(true))
    throw UsageError("accelmgr::init() was called twice; call it once, first in main()");
  open_standard_streams();
  ipc::take_role(argc, argv);
  if (!ipc::has_one_thread())
    throw UsageError(fmt::format(
        "accelmgr::init() was called with {} threads running; call it first in main()", ipc::thread_count()));
  base::start_logging("host");
}

bool manager::initialized() noexcept { return called.load(); }

void manager::embed(Interpreter interpreter) {
  if (called.exchange(true)) throw UsageError("accelmgr was initialized twice in this process");
  open_standard_streams();
  ipc::set_self(interpreter.command);
  the_interpreter() = std::move(interpreter);
  ipc::let_be_executed();
  base::start_logging("host");
}

void manager::take_role(std::span<const std::string> arguments) {
  std::vector<char*> argv{nullptr};
  std::vector<std::string> copies(arguments.begin(), arguments.end());
  std::string name = "accelmgr";
  argv[0] = name.data();
  for (auto& copy : copies) argv.push_back(copy.data());
  ipc::take_role(static_cast<int>(argv.size()), argv.data());
}

const manager::Interpreter& manager::interpreter() noexcept { return the_interpreter(); }

void manager::at_begin(std::function<void()> call) { beginnings().push_back(std::move(call)); }

void manager::call_at_begin() {
  interpreter().manager_began();
  for (const auto& call : beginnings()) call();
}

}  // namespace accelmgr
