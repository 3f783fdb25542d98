#include "base/ipc/network.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>

#include "accelmgr/errors.hpp"

namespace accelmgr::ipc {
namespace {

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

const sockaddr* any(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

TEST(Network, NoSocketHasNoPort) { EXPECT_THROW(bound_port(-1), SystemError); }

TEST(Network, AddressesAreReadAsNumbers) {
  const auto address = loopback(80);
  EXPECT_EQ(host_of(any(address)), "127.0.0.1");
  EXPECT_EQ(port_of(any(address)), 80);
  const sockaddr local{.sa_family = AF_UNIX, .sa_data = {}};
  EXPECT_EQ(host_of(&local), "");
  EXPECT_EQ(port_of(&local), 0);
}

TEST(Network, TheLoopbackInterfaceHasItsAddress) {
  const auto all = interface_addresses();
  const auto lo = std::ranges::find(all, "127.0.0.1", &InterfaceAddress::host);
  ASSERT_NE(lo, all.end());
  EXPECT_EQ(lo->interface, "lo");
  EXPECT_TRUE(lo->up && lo->loopback && !lo->link_local);
}

}  // namespace
}  // namespace accelmgr::ipc
