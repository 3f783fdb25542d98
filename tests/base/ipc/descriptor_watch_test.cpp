// Tests of Watch, through which an event loop tells that a descriptor is readable.
#include "base/ipc/descriptor_watch.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {
namespace {

base::UniqueFd event() { return base::UniqueFd(eventfd(0, EFD_CLOEXEC)); }

void make_readable(const base::UniqueFd& fd) { ASSERT_EQ(eventfd_write(fd.get(), 1), 0); }

// Asio reuses its record of a descriptor together with an event that is queued for it. A new watch must not
// get the event of the descriptor before.
TEST(Watch, IsNotToldOfTheDescriptorOfOneBeforeIt) {
  boost::asio::io_context context;
  const auto cause = event(), before = event(), quiet = event();
  int told = 0;
  std::unique_ptr<Watch> next;
  auto first = std::make_unique<Watch>(context, before.get(), [] { return false; });
  const Watch replaces(context, cause.get(), [&] {
    first.reset();
    next = std::make_unique<Watch>(context, quiet.get(), [&told] {
      ++told;
      return false;
    });
    return false;
  });
  make_readable(cause);
  make_readable(before);
  context.poll();
  EXPECT_EQ(told, 0);
  make_readable(quiet);
  context.poll();
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace accelmgr::ipc
