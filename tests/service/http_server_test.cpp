// What a client may do to the socket of a service, and what it may not.
#include "service/http_server.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <nlohmann/json.hpp>
#include <thread>

#include "client/service_socket.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"
#include "service/socket_path.hpp"
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
    if (request.path == "/socket") {
      auto [ours, theirs] = ipc::socket_pair();
      ipc::send(ours.get(), "hello");
      return respond({.status = 101, .fd = std::make_shared<const base::UniqueFd>(std::move(theirs))});
    }
    respond(json_response({{"method", request.method},
                           {"path", request.path},
                           {"query", request.query},
                           {"body", request.body},
                           {"upgrade", request.header_field("upgrade")},
                           {"pid", request.peer->pid}}));
  }

  client::ServiceSocket connect() const { return client::ServiceSocket::connect(path_, soon()); }
  client::ServiceAnswer ask(const std::string& target, const std::string& head = "",
                            const std::string& body = "") {
    return connect().ask("GET", target, head, body, soon());
  }

  base::UniqueFd raw() const {
    base::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  static void write(int fd, std::string_view text) {
    EXPECT_EQ(::send(fd, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  /// All that the server sends until it closes the connection.
  static std::string read_all(int fd) {
    std::string text;
    char part[4096];
    while (ipc::wait_ready(fd, POLLIN, soon()) != 0) {
      const auto bytes = recv(fd, part, sizeof part, 0);
      if (bytes <= 0) return text;
      text.append(part, static_cast<std::size_t>(bytes));
    }
    ADD_FAILURE() << "the server has not closed the connection; it sent: " << text;
    return text;
  }

  test::TemporaryFolder folder_;
  std::string path_ = (folder_ / "socket").string();
  boost::asio::io_context loop_;
  std::optional<SocketPath> socket_;
  std::optional<HttpServer> server_;
  Respond later_;
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

TEST_F(HttpServerTest, AConnectionServesOneRequestAfterTheOther) {
  serve();
  auto connection = connect();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(connection.ask("GET", "/", "", "", soon()).status, 200);
}

TEST_F(HttpServerTest, RequestsThatAreSentAtOnceAreServedInOrder) {
  serve();
  const auto fd = raw();
  write(fd.get(),
        "GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nGET /3 HTTP/1.1\r\nConnection: close\r\n\r\n");
  const auto text = read_all(fd.get());
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

TEST_F(HttpServerTest, ADescriptorComesWithTheResponse) {
  serve();
  const auto answer = ask("/socket");
  ASSERT_EQ(answer.status, 101);
  ASSERT_TRUE(answer.fd);
  EXPECT_EQ(ipc::receive(answer.fd.get(), soon())->bytes, "hello");
}

TEST_F(HttpServerTest, WhatIsTooLargeIsRefused) {
  serve({.header_bytes = 1024, .body_bytes = 1024});
  EXPECT_EQ(ask("/", "X: " + std::string(2000, 'x') + "\r\n").status, 431);
  EXPECT_EQ(ask("/", "", std::string(2000, 'x')).status, 413);
  const auto fd = raw();
  write(fd.get(), "POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n");
  EXPECT_THAT(read_all(fd.get()), StartsWith("HTTP/1.1 4"));
  EXPECT_EQ(ask("/").status, 200);
}

TEST_F(HttpServerTest, WhatIsNoHttpIsRefused) {
  serve();
  for (const auto* text : {"hello\r\n\r\n", "GET / HTTP/9\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n",
                           "\x16\x03\x01"
                           "\r\n\r\n"}) {
    const auto fd = raw();
    write(fd.get(), text);
    EXPECT_THAT(read_all(fd.get()), HasSubstr("bad_request")) << text;
  }
}

TEST_F(HttpServerTest, AClientThatSendsNothingLosesItsConnection) {
  serve({.between_s = 0.05});
  const auto silent = raw();
  EXPECT_EQ(read_all(silent.get()), "");
}

TEST_F(HttpServerTest, AClientThatSendsHalfARequestLosesItsConnection) {
  serve({.request_s = 0.05});
  const auto half = raw();
  write(half.get(), "GET / HT");
  EXPECT_EQ(read_all(half.get()), "");
  EXPECT_EQ(ask("/").status, 200);
}

TEST_F(HttpServerTest, OneConnectionTooManyIsRefused) {
  serve({.connections = 2});
  const auto first = raw(), second = raw();
  write(first.get(), "GET /later HTTP/1.1\r\n\r\n");
  write(second.get(), "GET / HTTP/1.1\r\n\r\n");
  ASSERT_NE(ipc::wait_ready(second.get(), POLLIN, soon()), 0);
  const auto third = raw();
  EXPECT_THAT(read_all(third.get()), HasSubstr("too_many_connections"));
}

TEST_F(HttpServerTest, AClientThatIsGoneBeforeItsAnswerHarmsNothing) {
  serve();
  {
    const auto fd = raw();
    write(fd.get(), "GET /later HTTP/1.1\r\n\r\n");
    const auto other = raw();
    write(other.get(), "GET / HTTP/1.1\r\nConnection: close\r\n\r\n");
    read_all(other.get());  // The server has read the first request by now.
  }
  boost::asio::post(loop_, [this] {
    if (later_) later_(json_response({{"late", true}}));
  });
  EXPECT_EQ(ask("/").status, 200);
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
