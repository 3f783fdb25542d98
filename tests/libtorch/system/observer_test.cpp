// The tensors of an Observer. What observers may do and what they see is tested in tests/engine/system.
#include "accelmgr/observer.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string_view>

#include "accelmgr/init.hpp"
#include "base/ipc/process.hpp"
#include "engine/service/service.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

constexpr const char* serves = "--serves";
constexpr int says = 3;  ///< The descriptor by which a service says that it is ready.

[[noreturn]] void serve(const char* socket) {
  service::serve(small_config("mlp"), {.socket = socket}, [](const std::string&) {
    if (write(says, "r", 1) != 1) _exit(3);
  });
}

class ServiceProcess {
 public:
  ServiceProcess() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe2", errno);
    const base::UniqueFd hears(ends[0]);
    base::UniqueFd said(ends[1]);
    const std::pair<int, int> inherited[] = {{said.get(), says}};
    process_ = ipc::execute_self({serves, socket()}, inherited);
    said.reset();
    char ready = 0;
    EXPECT_EQ(read(hears.get(), &ready, 1), 1);
  }
  ~ServiceProcess() { EXPECT_EQ(terminate(), 0); }
  ServiceProcess(const ServiceProcess&) = delete;
  ServiceProcess& operator=(const ServiceProcess&) = delete;

  std::string socket() const { return folder_ / "socket"; }
  pid_t pid() const { return process_.pid; }

 private:
  int terminate() {
    ipc::send_signal(process_.pidfd.get(), SIGTERM);
    int status = -1;
    waitpid(process_.pid, &status, 0);
    return status;
  }

  TemporaryFolder folder_;
  ipc::Child process_;
};

TEST(Observer, HasTheParametersAsTheHostHasThem) {
  const ServiceProcess service;
  auto observer = Observer::attach(service.socket());
  StepResult made;
  std::vector<std::string> names;
  {
    auto manager = Manager::attach(service.socket());
    made = manager.step();
    ASSERT_TRUE(made) << made.error;
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : manager.parameters()) {
      tensor.fill_(static_cast<double>(names.size()));
      names.push_back(name);
    }
  }
  const auto copy = observer.parameters(60);
  EXPECT_EQ(copy.step, 1u);
  ASSERT_EQ(copy.tensors.size(), names.size());
  auto manager = Manager::attach(service.socket());
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(copy.tensors[i].name, names[i]);
    EXPECT_TRUE(copy.tensors[i].tensor.equal(manager.parameters()[i].tensor.detach()));
    EXPECT_TRUE(copy.tensors[i].tensor.equal(at::full_like(copy.tensors[i].tensor, double(i))));
  }
  const auto seen = observer.next_step(60);
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->loss, made.loss);
  EXPECT_EQ(observer.last_step()->step, 1u);
  EXPECT_EQ(observer.statistics().manager_pid, service.pid());
  EXPECT_FALSE(observer.has_ended());
}

}  // namespace
}  // namespace accelmgr::test

int main(int argc, char** argv) {
  const bool is_service = argc == 3 && std::string_view(argv[1]) == accelmgr::test::serves;
  if (is_service) accelmgr::ipc::die_with(getppid());
  accelmgr::init(argc, argv);
  if (is_service) accelmgr::test::serve(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
