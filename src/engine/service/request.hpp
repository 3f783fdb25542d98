// A request to a service, its response, and the form of errors. Nothing here knows HTTP beyond its status
// codes.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "engine/service/peer.hpp"

namespace accelmgr::service {

struct Request {
  std::string method;
  std::string path;  ///< Without the query.
  std::map<std::string, std::string> query{};
  /// The fields of the header that handlers read, by names in lower case.
  std::map<std::string, std::string> header{};
  std::string body{};
  nlohmann::json fields{};             ///< Those of the body, checked; set by handle().
  std::shared_ptr<const Peer> peer{};  ///< Null: it came over TCP.
  bool is_admitted = true;             ///< False: it came over TCP, without the token.

  std::string header_field(const std::string& name) const;
};

/// The body of a response that goes on. It ends with the connection: when the client leaves, or does not
/// read.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Does not block: what the client has no room for is kept until it reads. A client for which too much is
  /// kept loses its connection.
  virtual void send(std::string_view part) = 0;
};

/// Fields of a response's header: name and value.
using Header = std::vector<std::pair<std::string, std::string>>;

struct Response {
  int status = 200;
  std::string body{};
  std::string type = "application/json";
  Header header{};
  /// If not empty, the body goes on after `body`: called with its stream, which is gone when the client is.
  std::function<void(std::weak_ptr<Stream>)> stream{};
  /// Sent with the response. The connection ends then.
  std::shared_ptr<const base::UniqueFd> fd{};
  /// Called if that cannot be sent. May be empty.
  std::function<void()> undelivered{};
};

/// Takes the response of a request, now or later. Called once, on the server's thread; a handler with
/// Route::acts calls it on the supervisor's thread. Does nothing if the client has left meanwhile.
using Respond = std::function<void(Response)>;

struct ProblemDetails {
  int rank = -1;           ///< -1: none.
  std::int64_t step = -1;  ///< -1: none.
  std::string hint{};      ///< What to do.
  Header header{};
};

/// Why a request is not served. Handlers throw it.
class Problem : public std::exception {
 public:
  /// `code` names the problem for programs: "host_drives". `message` is for people.
  Problem(int status, std::string code, std::string message, ProblemDetails details = {});
  const char* what() const noexcept override { return message_.c_str(); }

  /// {"error": {"code": ..., "message": ..., "rank": ..., "step": ..., "hint": ...}}
  Response response() const;

 private:
  int status_;
  std::string code_, message_;
  ProblemDetails details_;
};

/// The response to a request that has failed with the exception under way. Logs one that is no Problem.
Response response_of_exception();

Response json_response(const nlohmann::json& body, int status = 200);

}  // namespace accelmgr::service
