#include "accelmgr/init.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "ipc/process.hpp"
#include "manager/process.hpp"
#include "manager/role.hpp"

namespace accelmgr {
namespace {

std::atomic<bool> called{false};

}  // namespace

void init(int argc, char** argv) {
  if (called.exchange(true))
    throw UsageError("accelmgr::init() was called twice; call it once, first in main()");
  if (argc == 2 && std::strcmp(argv[1], manager::role_argument) == 0)
    manager::run(base::UniqueFd(manager::role_socket));
  if (argc == 2 && std::strcmp(argv[1], manager::launcher_argument) == 0)
    manager::run_launcher(base::UniqueFd(manager::role_socket));
  if (const int threads = ipc::thread_count(); threads != 1)
    throw UsageError(
        fmt::format("accelmgr::init() was called with {} threads running; call it first in main()", threads));
  base::start_logging("host");
}

bool manager::initialized() noexcept { return called.load(); }

}  // namespace accelmgr
