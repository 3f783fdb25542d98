#include "launcher/distributed/store/tcp_store.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <future>
#include <string>

#include "accelmgr/communicator.hpp"
#include "base/ipc/network.hpp"
#include "launcher/collective/expect_error.hpp"
#include "message_of.hpp"
#include "reserved_port.hpp"

namespace accelmgr::distributed {
namespace {

using base::Deadline;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr double plenty_s = 20;

struct Pair {
  std::unique_ptr<TcpStore> server, client;
  int port;
};

Pair make_pair_of_stores() {
  auto socket = ipc::bind_tcp("127.0.0.1", 0);
  const int port = ipc::bound_port(socket.get());
  auto server = TcpStore::serve(std::move(socket));
  return {std::move(server), TcpStore::connect("127.0.0.1", port, Deadline::in_seconds(plenty_s)), port};
}

TEST(TcpStore, ServesAtTheSocketThatWasBound) {
  const auto stores = make_pair_of_stores();
  EXPECT_EQ(stores.server->address(), fmt::format("127.0.0.1:{}", stores.port));
  EXPECT_EQ(stores.client->address(), stores.server->address());
}

TEST(TcpStore, AllClientsSeeWhatOneHasSet) {
  const auto stores = make_pair_of_stores();
  const std::string bytes("\0a\xff\n", 4);
  stores.server->set("key", bytes);
  EXPECT_EQ(stores.client->get("key", Deadline::in_seconds(plenty_s)), bytes);
  EXPECT_TRUE(stores.client->has("key"));
  EXPECT_FALSE(stores.client->has("other"));
  EXPECT_EQ(stores.client->add("sum", 2), 2);
  EXPECT_EQ(stores.server->add("sum", 3), 5);
}

TEST(TcpStore, GetWaitsForTheKey) {
  const auto stores = make_pair_of_stores();
  auto waiting = std::async(std::launch::async,
                            [&] { return stores.client->get("late", Deadline::in_seconds(plenty_s)); });
  stores.server->set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
}

TEST(TcpStore, AKeyThatNobodySetsIsATimeoutThatNamesItAndTheStoreIsStillOfUse) {
  const auto stores = make_pair_of_stores();
  EXPECT_THAT(test::expect_error(CollectiveError::Cause::timeout, {},
                                 [&] { stores.client->get("never", Deadline::in_seconds(0.05)); }),
              AllOf(HasSubstr("'never'"), HasSubstr(stores.client->address())));
  stores.server->set("now", "1");
  EXPECT_EQ(stores.client->get("now", Deadline::in_seconds(plenty_s)), "1");
}

TEST(TcpStore, ErasesAllKeysButThoseOfAPrefix) {
  const auto stores = make_pair_of_stores();
  for (const auto* key : {"a", "kept/a", "b/kept/c"}) stores.client->set(key, "1");
  stores.client->add("sum", 4);
  stores.server->erase_all_but("kept/");
  EXPECT_TRUE(stores.client->has("kept/a"));
  for (const auto* key : {"a", "b/kept/c", "sum"}) EXPECT_FALSE(stores.client->has(key)) << key;
  EXPECT_EQ(stores.client->add("sum", 1), 1);
}

TEST(TcpStore, AServerThatIsGoneIsAnErrorThatNamesTheAddressEveryTime) {
  auto stores = make_pair_of_stores();
  const auto address = stores.client->address();
  stores.server.reset();
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(message_of<SessionError>([&] { stores.client->add("sum", 1); }), HasSubstr(address));
  }
}

TEST(TcpStore, ConnectingWaitsUntilItIsServed) {
  const test::ReservedPort reserved;
  const int port = reserved.number();
  auto connecting = std::async(std::launch::async, [port] {
    return TcpStore::connect("127.0.0.1", port, Deadline::in_seconds(plenty_s));
  });
  const auto server = TcpStore::serve(ipc::bind_tcp("127.0.0.1", port));
  server->set("key", "value");
  EXPECT_EQ(connecting.get()->get("key", Deadline::in_seconds(plenty_s)), "value");
}

TEST(TcpStore, ConnectingToNobodyNamesTheAddress) {
  const test::ReservedPort reserved;
  const int port = reserved.number();
  EXPECT_THAT(
      message_of<SessionError>([port] { TcpStore::connect("127.0.0.1", port, Deadline::in_seconds(1)); }),
      AllOf(HasSubstr(fmt::format("127.0.0.1:{}", port)), HasSubstr("refused")));
}

TEST(TcpStore, ConnectingToWhatIsNoStoreEndsAtTheDeadline) {
  const auto silent =
      ipc::bind_tcp("127.0.0.1", 0);  // The kernel accepts connections, but no process replies.
  const int port = ipc::bound_port(silent.get());
  EXPECT_THAT(
      message_of<SessionError>([&] { TcpStore::connect("127.0.0.1", port, Deadline::in_seconds(1)); }),
      HasSubstr("does not answer as a store"));
}

TEST(BindTcp, APortInUseIsAnErrorThatNamesIt) {
  const auto first = ipc::bind_tcp("127.0.0.1", 0);
  const int port = ipc::bound_port(first.get());
  EXPECT_THAT(message_of<ConfigError>([port] { ipc::bind_tcp("127.0.0.1", port); }),
              HasSubstr(fmt::format("port {} is in use", port)));
}

/// Longer than a part of a host name can be, so no name server is asked.
const std::string no_name(64, 'x');

TEST(BindTcp, ANameThatNobodyKnowsIsNamed) {
  EXPECT_EQ(message_of<ConfigError>([] { ipc::bind_tcp(no_name, 5); }),
            fmt::format("cannot listen at {}:5: Name or service not known", no_name));
}

TEST(TcpStore, ConnectingToANameThatNobodyKnowsNamesIt) {
  EXPECT_THAT(message_of<SessionError>([] { TcpStore::connect(no_name, 5, Deadline::in_seconds(1)); }),
              HasSubstr(fmt::format("cannot reach {}:5: Name or service not known; tried for", no_name)));
}

TEST(BindTcp, AnAddressOfAnotherNodeIsAnErrorThatNamesIt) {
  EXPECT_THAT(message_of<ConfigError>([] { ipc::bind_tcp("192.0.2.1", 29500); }),
              HasSubstr("192.0.2.1:29500: that is not an address of this node"));
}

}  // namespace
}  // namespace accelmgr::distributed
