// HTTP over a Unix socket or a TCP port: reads requests within limits, hands them to a handler, and sends the
// responses.
//
// Each connection serves one request after the other. A client that is too slow, sends too much or is one too
// many loses its connection; nothing waits for it. The connection of a client that leaves before its answer
// is free at once.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <variant>

#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"
#include "engine/service/peer.hpp"
#include "engine/service/request.hpp"
#include "engine/service/token.hpp"

namespace accelmgr::service {

struct HttpLimits {
  std::size_t header_bytes = 8 * 1024;
  std::size_t body_bytes = 64 * 1024;
  std::size_t stream_bytes = 256 * 1024;  ///< Of a stream: so many unread bytes end the connection.
  int connections = 128;
  double requests_per_s = 5000;  ///< Of all clients together.
  double request_s = 10;         ///< For a client to send a request, and to read its response.
  double between_s = 60;         ///< A connection without a request ends after this.
};

/// Used by the thread of its loop. Does not block.
class HttpServer : base::Unmovable {
 public:
  using Handler = std::function<void(const Request&, Respond)>;

  /// `socket` listens: a Unix socket for those who have `Access`, or a TCP port for those who know a token.
  /// The former are refused at once; requests of the latter reach the handler, and say whether they know it.
  HttpServer(boost::asio::io_context& loop, base::UniqueFd socket, std::variant<Access, Token> guard,
             HttpLimits limits, Handler handler);
  ~HttpServer();

 private:
  struct Shared;
  class Connection;
  static void accept(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_;
};

}  // namespace accelmgr::service
