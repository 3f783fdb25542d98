#include "engine/service/http_server.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/basic_stream.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/refusals.hpp"
#include "base/timing.hpp"

namespace accelmgr::service {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Protocol = asio::generic::stream_protocol;
using boost::system::error_code;

/// "accelmgr-host" says which process attaches; "host" is the field of HTTP.
constexpr std::array header_fields{"accelmgr-build", "accelmgr-host",  "host",   "last-event-id",
                                   "origin",         "sec-fetch-site", "upgrade"};

std::chrono::milliseconds duration(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

int hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/// Throws Problem for what is no percent-encoding.
std::string decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i] == '+' ? ' ' : text[i];
      continue;
    }
    const int high = i + 1 < text.size() ? hex(text[i + 1]) : -1,
              low = i + 2 < text.size() ? hex(text[i + 2]) : -1;
    if (high < 0 || low < 0) throw Problem(400, "bad_request", "the address has a wrong percent-encoding");
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

Protocol protocol_of(int socket) {
  int family = 0;
  socklen_t size = sizeof family;
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0)
    throw SystemError("asking a socket for its family", errno);
  return {family, family == AF_UNIX ? 0 : IPPROTO_TCP};
}

Request request_of(const http::request<http::string_body>& from, std::shared_ptr<const Peer> peer) {
  if (from.count(http::field::host) > 1)  // A proxy may have looked at the other one (RFC 9112, 3.2).
    throw Problem(400, "bad_request", "the request has more than one Host");
  Request request{.method = std::string(from.method_string()), .path = {}};
  const std::string_view target(from.target().data(), from.target().size());
  const auto mark = target.find('?');
  request.path = decoded(target.substr(0, mark));
  auto rest = mark == std::string_view::npos ? std::string_view() : target.substr(mark + 1);
  while (!rest.empty()) {
    const auto part = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const auto equals = part.find('=');
    request.query[decoded(part.substr(0, equals))] =
        equals == std::string_view::npos ? "" : decoded(part.substr(equals + 1));
  }
  for (const auto* name : header_fields)
    if (const auto found = from.find(name); found != from.end())
      request.header[name] = std::string(found->value());
  request.body = from.body();
  request.peer = std::move(peer);
  return request;
}

}  // namespace

/// What connections and the operations of the acceptor use, which may end after the server.
struct HttpServer::Shared {
  asio::basic_socket_acceptor<Protocol> acceptor;
  asio::steady_timer retry;
  std::variant<Access, Token> guard;
  HttpLimits limits;
  Handler handler;
  int connections = 0;
  base::Refusals refusals{};
  double allowance = limits.requests_per_s;  ///< Requests that may come now. It grows again with time.
  std::int64_t seen_ns = base::now_ns();

  /// Whether one more request is within the rate.
  bool has_room() {
    const auto now = base::now_ns();
    allowance += timing::seconds(now - std::exchange(seen_ns, now)) * limits.requests_per_s;
    allowance = std::min(allowance, limits.requests_per_s);
    if (allowance < 1) return false;
    allowance -= 1;
    return true;
  }
};

class HttpServer::Connection final : public Stream, public std::enable_shared_from_this<Connection> {
 public:
  Connection(Protocol::socket socket, std::shared_ptr<Shared> shared)
      : stream_(std::move(socket)), shared_(std::move(shared)), buffer_(most_buffered()) {
    ++shared_->connections;
  }
  ~Connection() override { --shared_->connections; }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void begin() {
    const int fd = stream_.socket().native_handle();
    if (shared_->connections > shared_->limits.connections)
      return refuse({503,
                     "too_many_connections",
                     "the service has as many connections as it takes",
                     {.hint = "close one, or try again"}});
    const auto* access = std::get_if<Access>(&shared_->guard);
    if (access == nullptr) return wait_for_request();
    try {
      auto peer = std::make_shared<Peer>(peer_of(fd));
      if (!may_use(*peer, fd, *access))
        return refuse({403, "not_allowed", fmt::format("user {} may not use this service", peer->uid)});
      peer_ = std::move(peer);
    } catch (const Error& error) {
      return refuse({403, "not_allowed", error.what()});
    }
    wait_for_request();
  }

  void send(std::string_view part) override {
    unsent_ += part;
    if (!waits_for_room_) return send_unsent();
    if (unsent_.size() <= shared_->limits.stream_bytes) return;
    shared_->refusals.note("a client does not read its stream, and loses its connection");
    close();
  }

 private:
  std::size_t most_buffered() const { return shared_->limits.header_bytes + shared_->limits.body_bytes; }

  void wait_for_request() {
    parser_.emplace();
    parser_->header_limit(static_cast<std::uint32_t>(shared_->limits.header_bytes));
    parser_->body_limit(shared_->limits.body_bytes);
    if (buffer_.size() > 0) return read();  // The client has sent the next request already.
    stream_.expires_after(duration(shared_->limits.between_s));
    stream_.async_read_some(buffer_.prepare(std::min<std::size_t>(buffer_.max_size(), 4096)),
                            [self = shared_from_this()](const error_code& error, std::size_t bytes) {
                              if (error) return;
                              self->buffer_.commit(bytes);
                              self->read();
                            });
  }

  void read() {
    stream_.expires_after(duration(shared_->limits.request_s));
    http::async_read(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](const error_code& error, std::size_t) { self->take(error); });
  }

  void take(const error_code& error) {
    if (error == http::error::end_of_stream || error == beast::error::timeout) return;
    if (error == http::error::header_limit)
      return refuse(
          {431, "header_too_large", fmt::format("a header may have {} bytes", shared_->limits.header_bytes)});
    if (error == http::error::body_limit || error == http::error::buffer_overflow)
      return refuse(
          {413, "body_too_large", fmt::format("a body may have {} bytes", shared_->limits.body_bytes)});
    if (error.category() == http::make_error_code(http::error::bad_method).category())
      return refuse({400, "bad_request", fmt::format("this is no request of HTTP: {}", error.message())});
    if (error) return;
    stream_.expires_never();  // The handler has limits of its own.
    keep_alive_ = parser_->get().keep_alive();
    is_answered_ = false;
    try {
      if (!shared_->has_room())
        throw Problem(429, "too_many_requests",
                      fmt::format("the service takes {} requests a second", shared_->limits.requests_per_s),
                      {.hint = "try again", .header = {{"Retry-After", "1"}}});
      auto request = request_of(parser_->get(), peer_);
      request.is_admitted = is_admitted();
      shared_->handler(request, [weak = weak_from_this()](Response response) {
        if (const auto self = weak.lock()) return self->answer(std::move(response));
        if (response.undelivered) response.undelivered();
      });
    } catch (...) {
      answer(response_of_exception());
    }
    if (!is_answered_) watch_client();
  }

  bool is_admitted() const {
    const auto* token = std::get_if<Token>(&shared_->guard);
    const auto stated = parser_->get()[http::field::authorization];
    return token == nullptr || token->is_stated_by({stated.data(), stated.size()});
  }

  /// Until it is cancelled this keeps the connection, and closes it when the client has left. A client that
  /// has only ended its own sending is still there.
  void watch_client() {
    stream_.socket().async_wait(Protocol::socket::wait_error,
                                [self = shared_from_this()](const error_code& error) {
                                  if (!error) self->close();
                                });
  }

  void close() {
    error_code ignored;
    stream_.socket().close(ignored);
  }

  void answer(Response response) {
    is_answered_ = true;
    stream_.socket().cancel();
    if (response.fd) return send_descriptor(response);
    if (response.stream) return begin_stream(response);
    send_whole(std::move(response));
  }

  void refuse(const Problem& problem) {
    shared_->refusals.note(problem.what());
    keep_alive_ = false;
    send_whole(problem.response());
  }

  void send_whole(Response response) {
    response_ = {};
    response_.result(static_cast<unsigned>(response.status));
    response_.version(11);
    response_.set(http::field::content_type, response.type);
    response_.set(http::field::cache_control, "no-store");
    for (const auto& [name, value] : response.header) response_.set(name, value);
    response_.keep_alive(keep_alive_);
    response_.body() = std::move(response.body);
    response_.prepare_payload();
    stream_.expires_after(duration(shared_->limits.request_s));
    http::async_write(stream_, response_, [self = shared_from_this()](const error_code& error, std::size_t) {
      self->sent(error);
    });
  }

  void sent(const error_code& error) {
    if (!error && keep_alive_) return wait_for_request();
    error_code ignored;
    stream_.socket().shutdown(Protocol::socket::shutdown_send, ignored);
  }

  void begin_stream(const Response& response) {
    error_code ignored;
    stream_.socket().non_blocking(true, ignored);
    watch_client();
    send(fmt::format(
        "HTTP/1.1 {} OK\r\nContent-Type: {}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n{}",
        response.status, response.type, response.body));
    response.stream(weak_from_this());
  }

  void send_unsent() {
    error_code error;
    std::size_t sent = 0;
    while (!error && sent < unsent_.size())
      sent += stream_.socket().write_some(asio::buffer(unsent_) + sent, error);
    unsent_.erase(0, sent);
    if (!error) return;
    if (error != asio::error::would_block) return close();
    waits_for_room_ = true;
    stream_.socket().async_wait(Protocol::socket::wait_write,
                                [self = shared_from_this()](const error_code& ended) {
                                  self->waits_for_room_ = false;
                                  if (!ended) self->send_unsent();
                                });
  }

  /// The descriptor comes with the header's first byte. There is room for so little in a socket that was just
  /// read from.
  void send_descriptor(const Response& response) {
    const int fd = response.fd->get();
    try {
      std::string head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n";
      for (const auto& [name, value] : response.header) head += fmt::format("{}: {}\r\n", name, value);
      ipc::send(stream_.socket().native_handle(), head + "\r\n", {&fd, 1}, base::Deadline::at_ns(0));
    } catch (const Error& error) {
      base::log().info("a client did not take the descriptor that it had asked for: {}", error.what());
      if (response.undelivered) response.undelivered();
    }
  }

  beast::basic_stream<Protocol> stream_;
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<const Peer> peer_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  http::response<http::string_body> response_;
  bool keep_alive_ = false;
  bool is_answered_ = false;
  std::string unsent_;  ///< Of a stream.
  bool waits_for_room_ = false;
};

HttpServer::HttpServer(asio::io_context& loop, base::UniqueFd socket, std::variant<Access, Token> guard,
                       HttpLimits limits, Handler handler)
    : shared_(new Shared{.acceptor = {loop, protocol_of(socket.get()), socket.get()},
                         .retry = asio::steady_timer(loop),
                         .guard = std::move(guard),
                         .limits = limits,
                         .handler = std::move(handler)}) {
  socket.release();                             // The acceptor owns it now.
  shared_->acceptor.native_non_blocking(true);  // A client may have gone before it is accepted.
  accept(shared_);
}

HttpServer::~HttpServer() {
  error_code ignored;
  shared_->acceptor.close(ignored);
  shared_->retry.cancel();
}

void HttpServer::accept(const std::shared_ptr<Shared>& shared) {
  shared->acceptor.async_wait(Protocol::socket::wait_read, [shared](const error_code& error) {
    auto& acceptor = shared->acceptor;
    if (!acceptor.is_open()) return;
    // Not asio's accept(), whose sockets are inherited by what user code executes.
    base::UniqueFd fd(accept4(acceptor.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      const auto protocol = protocol_of(fd.get());
      Protocol::socket socket(acceptor.get_executor(), protocol, fd.release());
      std::make_shared<Connection>(std::move(socket), shared)->begin();
      return accept(shared);
    }
    if (!error && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) return accept(shared);
    // Without room for another descriptor the next call would fail at once, for ever.
    shared->retry.expires_after(std::chrono::milliseconds(20));
    shared->retry.async_wait([shared](const error_code&) {
      if (shared->acceptor.is_open()) accept(shared);
    });
  });
}

}  // namespace accelmgr::service
