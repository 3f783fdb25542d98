#include "accelmgr/init.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "ipc/process.hpp"
#include "launch/run/spawner.hpp"
#include "launch/run/zygote.hpp"
#include "manager/embedding.hpp"
#include "manager/process.hpp"
#include "manager/role.hpp"

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

/// Takes the role that the arguments name, and does not return then. Returns when they name none.
void take_role_of(int argc, char** argv) {
  launch::serve_role(manager::server_role, [](base::UniqueFd socket, base::UniqueFd host_pidfd) {
    manager::embedding().forked();
    manager::run(std::move(socket), std::move(host_pidfd));
  });
  launch::take_role(argc, argv);
  if (argc == 2 && std::strcmp(argv[1], manager::role_argument) == 0)
    manager::run(base::UniqueFd(manager::role_socket));
  if (argc == 2 && std::strcmp(argv[1], manager::fork_server_argument) == 0)
    manager::run_fork_server(base::UniqueFd(manager::role_socket));
}

manager::Embedding& the_embedding() {
  static manager::Embedding embedding;
  return embedding;
}

std::vector<std::function<void()>>& beginnings() {
  static std::vector<std::function<void()>> all;
  return all;
}

}  // namespace

void init(int argc, char** argv) {
  if (called.exchange(true))
    throw UsageError("accelmgr::init() was called twice; call it once, first in main()");
  open_standard_streams();
  take_role_of(argc, argv);
  if (!ipc::has_one_thread())
    throw UsageError(fmt::format(
        "accelmgr::init() was called with {} threads running; call it first in main()", ipc::thread_count()));
  base::start_logging("host");
}

bool manager::initialized() noexcept { return called.load(); }

void manager::embed(Embedding embedding) {
  if (called.exchange(true)) throw UsageError("accelmgr was initialized twice in this process");
  open_standard_streams();
  ipc::set_self(embedding.command);
  the_embedding() = std::move(embedding);
  launch::let_be_executed();
  base::start_logging("host");
}

void manager::take_role(std::span<const std::string> arguments) {
  std::vector<char*> argv{nullptr};
  std::vector<std::string> copies(arguments.begin(), arguments.end());
  std::string name = "accelmgr";
  argv[0] = name.data();
  for (auto& copy : copies) argv.push_back(copy.data());
  take_role_of(static_cast<int>(argv.size()), argv.data());
}

const manager::Embedding& manager::embedding() noexcept { return the_embedding(); }

void manager::at_begin(std::function<void()> call) { beginnings().push_back(std::move(call)); }

void manager::call_at_begin() {
  embedding().manager_began();
  for (const auto& call : beginnings()) call();
}

}  // namespace accelmgr
