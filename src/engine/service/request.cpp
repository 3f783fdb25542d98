#include "engine/service/request.hpp"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/checked_fields.hpp"
#include "base/exception_text.hpp"
#include "base/log.hpp"

namespace accelmgr::service {

using nlohmann::json;

std::string Request::header_field(const std::string& name) const {
  const auto found = header.find(name);
  return found == header.end() ? std::string() : found->second;
}

Problem::Problem(int status, std::string code, std::string message, ProblemDetails details)
    : status_(status), code_(std::move(code)), message_(std::move(message)), details_(std::move(details)) {}

Response Problem::response() const {
  auto response = json_response({{"error",
                                  {{"code", code_},
                                   {"message", message_},
                                   {"rank", details_.rank < 0 ? json() : json(details_.rank)},
                                   {"step", details_.step < 0 ? json() : json(details_.step)},
                                   {"hint", details_.hint.empty() ? json() : json(details_.hint)}}}},
                                status_);
  response.header = details_.header;
  return response;
}

Response response_of_exception() {
  try {
    throw;
  } catch (const Problem& problem) {
    return problem.response();
  } catch (...) {
    const auto text = base::current_exception_text();
    base::log().warn("a request was not served: {}", text);
    return Problem(500, "internal", text).response();
  }
}

Response json_response(const json& body, int status) {
  return {.status = status, .body = base::json_text(body) + "\n"};
}

}  // namespace accelmgr::service
