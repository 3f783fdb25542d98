#include "engine/service/notify.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <string>

#include "base/unique_fd.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::service {
namespace {

TEST(Notify, ReachesTheSocketOfTheEnvironment) {
  const test::TemporaryFolder folder;
  const auto path = (folder / "notify").string();
  const base::UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  setenv("NOTIFY_SOCKET", path.c_str(), 1);
  notify("READY=1\nSTATUS=fine");
  unsetenv("NOTIFY_SOCKET");
  char text[64]{};
  ASSERT_GT(recv(socket.get(), text, sizeof text, MSG_DONTWAIT), 0);
  EXPECT_STREQ(text, "READY=1\nSTATUS=fine");
}

TEST(Notify, DoesNothingWithoutASupervisor) {
  unsetenv("NOTIFY_SOCKET");
  notify("READY=1");
  for (const auto* wrong : {"relative", "/nothing/there", ""}) {
    setenv("NOTIFY_SOCKET", wrong, 1);
    notify("READY=1");
  }
  setenv("NOTIFY_SOCKET", ("/" + std::string(300, 'x')).c_str(), 1);
  notify("READY=1");
  unsetenv("NOTIFY_SOCKET");
}

}  // namespace
}  // namespace accelmgr::service
