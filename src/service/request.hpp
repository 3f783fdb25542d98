// A request to a service, its response, and the form of errors. Nothing here knows HTTP beyond its status
// codes.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/unique_fd.hpp"
#include "service/peer.hpp"

namespace accelmgr::service {

struct Request {
  std::string method;
  std::string path;  ///< Without the query.
  std::map<std::string, std::string> query{};
  /// The fields of the header that handlers read, by names in lower case.
  std::map<std::string, std::string> header{};
  std::string body{};
  std::shared_ptr<const Peer> peer{};

  std::string header_field(const std::string& name) const;
};

struct Response {
  int status = 200;
  std::string body{};
  std::string type = "application/json";
  /// Sent with the response. The connection ends then.
  std::shared_ptr<const base::UniqueFd> fd{};
  /// Called if that cannot be sent. May be empty.
  std::function<void()> undelivered{};
};

/// Takes the response of a request, now or later. Called once, on the thread of the service's loop.
using Respond = std::function<void(Response)>;

struct ProblemDetails {
  int rank = -1;           ///< -1: none.
  std::int64_t step = -1;  ///< -1: none.
  std::string hint{};      ///< What to do.
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

Response json_response(const nlohmann::json& body, int status = 200);

}  // namespace accelmgr::service
