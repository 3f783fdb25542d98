// Tests that spawn() names the limit when the kernel has no more descriptors or processes, and leaves nothing
// behind.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "accelmgr/errors.hpp"
#include "base/ipc/system_call.hpp"
#include "functions.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Limits : public Launched {};

/// The error that spawn() throws in a process that `prepare` has prepared.
template <class Prepare>
std::string said(StartMethod method, Prepare prepare) {
  const Line line;
  const auto client = fork_child([&] {
    prepare();
    try {
      spawn("obey", {"hang", "hang", "hang", "hang"}, options(4, method));
    } catch (const SystemError& error) {
      line.tell(error.what());
    } catch (const SessionError& error) {
      line.tell(error.what());
    }
    return left().empty() ? 0 : 1;
  });
  const auto text = line.hear().bytes;
  EXPECT_EQ(end_of(client), "exit code 0");
  return text;
}

TEST_F(Limits, NoMoreDescriptorsIsToldAsThatLimit) {
  for (const rlim_t more : {1, 2, 3, 4, 6, 8, 10}) {
    const auto text = said(StartMethod::fork, [more] {
      // The lowest free descriptor says about how many are open.
      const int open = dup(0);
      close(open);
      const rlimit limit{static_cast<rlim_t>(open) + more, static_cast<rlim_t>(open) + more};
      setrlimit(RLIMIT_NOFILE, &limit);
    });
    EXPECT_TRUE(says(text, {"RLIMIT_NOFILE"}));
  }
}

TEST_F(Limits, NoMoreProcessesIsToldAsThatLimit) {
  // RLIMIT_NPROC does not bind root, so the system call is made to fail as it would under the limit.
  const auto text = said(StartMethod::fork, [] { ipc::test::fail_system_call(SYS_clone, EAGAIN); });
  EXPECT_TRUE(says(text, {"RLIMIT_NPROC", "pids.max"}));
}

}  // namespace
}  // namespace accelmgr::launch::test
