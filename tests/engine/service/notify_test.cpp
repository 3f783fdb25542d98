#include "engine/service/notify.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

namespace accelmgr::service {
namespace {

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
