// What a client may do to the socket of a service, and what it may not.
#include "engine/service/http_server.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_future.hpp>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "base/ipc/network.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/service/socket_path.hpp"
#include "engine/service/tcp_listener.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::service {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

base::Deadline soon() { return base::Deadline::in_seconds(30); }

/// A server that answers with what it was asked, on a thread.
class HttpServerTest : public testing::Test {
 protected:
  void serve(HttpLimits limits = {}) {
    socket_.emplace(path_, std::nullopt);
    server_.emplace(loop_, socket_->take(), Access{}, limits,
                    [this](const Request& request, Respond respond) { handle(request, std::move(respond)); });
    thread_ = std::jthread([this] { loop_.run(); });
  }
  ~HttpServerTest() override {
    boost::asio::post(loop_, [this] {
      later_ = {};
      server_.reset();
      tcp_server_.reset();
      loop_.stop();
    });
  }

  void handle(const Request& request, Respond respond) {
    if (request.path == "/problem") throw Problem(418, "teapot", "short and stout");
    if (request.path == "/broken") throw std::runtime_error("a bug");
    if (request.path == "/later") {
      later_ = std::move(respond);
      return;
    }
    if (request.path == "/stream")
      return respond(
          {.body = "first\n", .type = "text/plain", .stream = [this](std::weak_ptr<Stream> stream) {
             streams_.push_back(std::move(stream));
           }});
    respond(json_response({{"method", request.method},
                           {"path", request.path},
                           {"query", request.query},
                           {"body", request.body},
                           {"upgrade", request.header_field("upgrade")},
                           {"pid", request.peer->pid}}));
  }

  /// Calls `work` on the thread of the loop.
  template <class Work>
  auto on_loop(Work work) {
    return boost::asio::post(loop_, boost::asio::use_future(std::move(work))).get();
  }
  /// Returns when `condition` holds on the thread of the loop.
  template <class Condition>
  void wait_until(Condition condition) {
    for (const auto until = soon(); !on_loop(condition);) {
      ASSERT_FALSE(until.passed());
      std::this_thread::yield();
    }
  }
  /// Sends a part to each stream that is still there.
  void send_to_streams(const std::string& part) {
    on_loop([&] {
      for (const auto& weak : streams_)
        if (const auto stream = weak.lock()) stream->send(part);
    });
  }

  client::ServiceAnswer ask(const std::string& target, const std::string& head = "",
                            const std::string& body = "") {
    return client::ServiceSocket::connect(path_, soon()).ask("GET", target, head, body, soon());
  }

  template <class Address>
  static base::UniqueFd connected(const Address& address) {
    const auto* to = reinterpret_cast<const sockaddr*>(&address);
    base::UniqueFd fd(socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), to, sizeof address), 0);
    return fd;
  }
  base::UniqueFd raw() const {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    return connected(address);
  }
  static void write(int fd, std::string_view text) {
    EXPECT_EQ(::send(fd, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  /// Serves a TCP port too, for those who know a token. Returns its port.
  int serve_tcp() {
    const auto file = folder_.write("token", "0123456789abcdef");
    std::filesystem::permissions(file, std::filesystem::perms::owner_read);
    auto listener = listen_at(":0");
    const int port = ipc::bound_port(listener.fd.get());
    on_loop([&] {
      tcp_server_.emplace(loop_, std::move(listener.fd), Token::from_file(file), HttpLimits{},
                          [](const Request& request, const Respond& respond) {
                            if (!request.is_admitted) throw Problem(401, "no_token", "who are you?");
                            EXPECT_EQ(request.peer, nullptr);
                            respond(json_response({{"path", request.path}}));
                          });
    });
    return port;
  }
  /// A connection to that port.
  static base::UniqueFd raw(int port) {
    return connected(sockaddr_in{.sin_family = AF_INET,
                                 .sin_port = htons(static_cast<std::uint16_t>(port)),
                                 .sin_addr = {htonl(INADDR_LOOPBACK)},
                                 .sin_zero = {}});
  }
  /// What the server sends until the requests in `text` have ended their connection.
  static std::string exchange(const base::UniqueFd& fd, std::string_view text) {
    write(fd.get(), text);
    return read_all(fd.get());
  }
  /// What the server sends until the text ends so, or without an end until it closes the connection.
  static std::string read_until(int fd, std::optional<std::string_view> end) {
    std::string text;
    char part[4096];
    while (!end || !text.ends_with(*end)) {
      EXPECT_NE(ipc::wait_ready(fd, POLLIN, soon()), 0)
          << "neither used nor closed; the server sent: " << text;
      const auto bytes = recv(fd, part, sizeof part, MSG_DONTWAIT);
      if (bytes <= 0) break;
      text.append(part, static_cast<std::size_t>(bytes));
    }
    EXPECT_TRUE(!end || text.ends_with(*end)) << text;
    return text;
  }
  static std::string read_all(int fd) { return read_until(fd, {}); }

  test::TemporaryFolder folder_;
  std::string path_ = (folder_ / "socket").string();
  boost::asio::io_context loop_;
  std::optional<SocketPath> socket_;
  std::optional<HttpServer> server_, tcp_server_;
  Respond later_;
  std::vector<std::weak_ptr<Stream>> streams_;
  std::jthread thread_;
};

TEST_F(HttpServerTest, ARequestReachesItsHandler) {
  serve();
  const auto answer = ask("/v1/a%20b?since=7&x&y=%26", "Upgrade: it\r\n", "text");
  EXPECT_EQ(answer.status, 200);
  const auto body = nlohmann::json::parse(answer.body);
  EXPECT_EQ(body["path"], "/v1/a b");
  EXPECT_EQ(body["query"], (nlohmann::json{{"since", "7"}, {"x", ""}, {"y", "&"}}));
  EXPECT_EQ(body["body"], "text");
  EXPECT_EQ(body["upgrade"], "it");
  EXPECT_EQ(body["pid"], getpid());
}

TEST_F(HttpServerTest, RequestsThatAreSentAtOnceAreServedInOrder) {
  serve();
  const auto text = exchange(
      raw(), "GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nGET /3 HTTP/1.1\r\nConnection: close\r\n\r\n");
  const auto first = text.find("\"/1\""), second = text.find("\"/2\""), third = text.find("\"/3\"");
  EXPECT_LT(first, second);
  EXPECT_LT(second, third);
  EXPECT_NE(third, std::string::npos);
}

TEST_F(HttpServerTest, AProblemIsAResponse) {
  serve();
  const auto answer = ask("/problem");
  EXPECT_EQ(answer.status, 418);
  EXPECT_EQ(client::error_code(answer), "teapot");
  EXPECT_EQ(ask("/broken").status, 500);
  EXPECT_EQ(ask("/%zz").status, 400);
  EXPECT_EQ(ask("/").status, 200);
}

TEST_F(HttpServerTest, WhatIsTooLargeIsRefused) {
  serve({.header_bytes = 1024, .body_bytes = 1024});
  EXPECT_EQ(ask("/", "X: " + std::string(2000, 'x') + "\r\n").status, 431);
  EXPECT_EQ(ask("/", "", std::string(2000, 'x')).status, 413);
  EXPECT_THAT(exchange(raw(), "POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"),
              StartsWith("HTTP/1.1 4"));
  EXPECT_EQ(ask("/").status, 200);
}

TEST_F(HttpServerTest, WhatIsNoHttpIsRefused) {
  serve();
  for (const auto* text : {"hello\r\n\r\n", "GET / HTTP/9\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n",
                           "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
                           "\x16\x03\x01"
                           "\r\n\r\n"}) {
    EXPECT_THAT(exchange(raw(), text), HasSubstr("bad_request")) << text;
  }
}

// A byte now and then does not make the time longer.
TEST_F(HttpServerTest, AClientThatSendsNothingOrSlowlyLosesItsConnection) {
  serve({.request_s = 0.2, .between_s = 0.05});
  EXPECT_EQ(read_all(raw().get()), "");
  for (const auto* begin : {"GET / HTTP/1.1\r\nX: ", "POST / HTTP/1.1\r\nContent-Length: 10000\r\n\r\n"}) {
    const auto slow = raw();
    write(slow.get(), begin);
    const auto until = soon();
    while (ipc::wait_ready(slow.get(), POLLIN, base::Deadline::in_seconds(0.01)) == 0) {
      ASSERT_FALSE(until.passed());
      send(slow.get(), "x", 1, MSG_NOSIGNAL);
    }
    EXPECT_EQ(read_all(slow.get()), "");
  }
}

// The token of a request does not admit those that follow on its connection.
TEST_F(HttpServerTest, EachRequestStatesTheToken) {
  serve();
  const auto text = exchange(raw(serve_tcp()),
                             "GET /x HTTP/1.1\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n"
                             "GET /y HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(text, HasSubstr("\"/x\""));
  EXPECT_THAT(text, HasSubstr("HTTP/1.1 401"));
}

TEST_F(HttpServerTest, ARequestTooManyInASecondIsRefused) {
  serve({.requests_per_s = 3});
  int refused = 0;
  for (int i = 0; i < 100; ++i) refused += ask("/").status == 429;
  EXPECT_GT(refused, 0);
  for (const auto until = soon(); ask("/").status != 200;) {
    ASSERT_FALSE(until.passed());
    std::this_thread::yield();
  }
}

TEST_F(HttpServerTest, OneConnectionTooManyIsRefused) {
  serve({.connections = 2});
  const auto first = raw(), second = raw();
  write(first.get(), "GET /later HTTP/1.1\r\n\r\n");
  write(second.get(), "GET / HTTP/1.1\r\n\r\n");
  ASSERT_NE(ipc::wait_ready(second.get(), POLLIN, soon()), 0);
  const auto third = raw();
  EXPECT_THAT(read_all(third.get()), HasSubstr("too_many_connections"));
  write(second.get(), "GET /goes-on HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(read_all(second.get()), HasSubstr("/goes-on"));
}

TEST_F(HttpServerTest, TheConnectionOfAClientThatLeavesBeforeItsAnswerIsFreeAtOnce) {
  serve({.connections = 1});
  {
    const auto fd = raw();
    write(fd.get(), "GET /later HTTP/1.1\r\n\r\n");
    wait_until([this] { return later_ != nullptr; });
  }
  for (const auto until = soon(); ask("/").status != 200;) ASSERT_FALSE(until.passed());
  on_loop([this] { later_(json_response({{"late", true}})); });
  EXPECT_EQ(ask("/").status, 200);
}

TEST_F(HttpServerTest, AClientThatHasEndedItsSendingGetsItsAnswer) {
  serve();
  const auto fd = raw();
  write(fd.get(), "GET /later HTTP/1.1\r\nConnection: close\r\n\r\n");
  ASSERT_EQ(shutdown(fd.get(), SHUT_WR), 0);
  wait_until([this] { return later_ != nullptr; });
  EXPECT_EQ(ask("/").status, 200);
  on_loop([this] { later_(json_response({{"late", true}})); });
  EXPECT_THAT(read_all(fd.get()), HasSubstr("late"));
}

TEST_F(HttpServerTest, AStreamGoesOnUntilItsClientLeaves) {
  serve();
  {
    const auto fd = raw();
    write(fd.get(), "GET /stream HTTP/1.1\r\n\r\n");
    EXPECT_THAT(read_until(fd.get(), "first\n"),
                StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"));
    for (const auto* part : {"second\n", "third\n"}) {
      send_to_streams(part);
      EXPECT_EQ(read_until(fd.get(), "\n"), part);
    }
  }
  wait_until([this] { return streams_.at(0).expired(); });
}

TEST_F(HttpServerTest, AClientThatDoesNotReadItsStreamLosesItWhileOthersGoOn) {
  serve({.stream_bytes = 64 * 1024});
  const auto reads = raw(), sleeps = raw();
  for (const auto* fd : {&reads, &sleeps}) {
    write(fd->get(), "GET /stream HTTP/1.1\r\n\r\n");
    ASSERT_NE(ipc::wait_ready(fd->get(), POLLIN, soon()), 0);
  }
  read_until(reads.get(), "first\n");
  ASSERT_EQ(on_loop([this] { return streams_.size(); }), 2u);
  const auto part = std::string(16 * 1024, '.') + "\n";
  std::size_t sent = 0;
  while (!on_loop([this] { return streams_[1].expired(); })) {
    ASSERT_LT(sent += part.size(), 64u << 20) << "so much is kept for a client";
    send_to_streams(part);
    ASSERT_EQ(read_until(reads.get(), "\n"), part);
  }
  send_to_streams("last\n");
  EXPECT_EQ(read_until(reads.get(), "\n"), "last\n");
  // What the kernel had taken is still there, and then the end.
  EXPECT_LT(read_all(sleeps.get()).size(), sent);
}

TEST_F(HttpServerTest, AStreamHasTheOrderInWhichItWasSent) {
  serve({.stream_bytes = 8 << 20});
  const auto fd = raw();
  write(fd.get(), "GET /stream HTTP/1.1\r\n\r\n");
  read_until(fd.get(), "first\n");
  std::string sent;
  for (int i = 0; i < 200; ++i) {  // More than a socket holds.
    const auto part = std::to_string(i) + std::string(10'000, '.') + (i == 199 ? "\n" : "");
    send_to_streams(part);
    sent += part;
  }
  EXPECT_TRUE(read_until(fd.get(), "\n") == sent);
}

TEST_F(HttpServerTest, CanEndWhileItHasNoDescriptorForAClient) {
  socket_.emplace(path_, std::nullopt);
  auto server = std::make_unique<HttpServer>(loop_, socket_->take(), Access{}, HttpLimits{},
                                             [](const Request&, const Respond&) {});
  const auto client = raw();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  loop_.run_one();  // The server cannot accept, and will try again.
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  server.reset();
  loop_.run();  // Ends, because nothing is left to do.
}

TEST_F(HttpServerTest, DescriptorsThatAClientPassesAreNotTaken) {
  serve();
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const base::UniqueFd reading(ends[0]);
  base::UniqueFd writing(ends[1]);
  const auto fd = raw();
  const int passed = writing.get();
  ipc::send(fd.get(), "GET / HTTP/1.1\r\nConnection: close\r\n\r\n", {&passed, 1}, soon());
  EXPECT_THAT(read_all(fd.get()), StartsWith("HTTP/1.1 200"));
  writing.reset();
  EXPECT_NE(ipc::wait_ready(reading.get(), POLLIN, soon()), 0) << "the server still holds the descriptor";
}

}  // namespace
}  // namespace accelmgr::service
