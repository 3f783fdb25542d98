#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string_view>

#include "accelmgr/init.hpp"
#include "engine/service/service.hpp"
#include "service_process.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr const char* serves = "--serves";
constexpr int says = 3;  ///< The descriptor by which a service says that it is ready.

[[noreturn]] void serve(const char* socket, const std::string& fault) {
  auto config = small_config("mlp");
  if (!fault.empty()) config.faults = {fault};
  service::serve(config, {.socket = socket}, [](const std::string&) {
    if (write(says, "r", 1) != 1) _exit(3);
  });
}

}  // namespace

ServiceProcess::ServiceProcess(const std::string& fault) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe2", errno);
  const base::UniqueFd hears(ends[0]);
  base::UniqueFd said(ends[1]);
  const std::pair<int, int> inherited[] = {{said.get(), says}};
  process_ = ipc::execute_self({serves, socket(), fault}, inherited);
  said.reset();
  char ready = 0;
  EXPECT_EQ(read(hears.get(), &ready, 1), 1);
}

ServiceProcess::~ServiceProcess() {
  ipc::send_signal(process_.pidfd.get(), SIGTERM);
  int status = -1;
  waitpid(process_.pid, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace accelmgr::test

int main(int argc, char** argv) {
  const bool is_service = argc == 4 && std::string_view(argv[1]) == accelmgr::test::serves;
  if (is_service) accelmgr::ipc::die_with(getppid());
  accelmgr::init(argc, argv);
  if (is_service) accelmgr::test::serve(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
