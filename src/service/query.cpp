#include "service/query.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/fields.hpp"

namespace accelmgr::service {

std::uint64_t whole_number(const std::string& text, const std::string& what, std::uint64_t least,
                           std::uint64_t most) {
  std::uint64_t number = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{} || stop != end || number < least || number > most)
    throw Problem(
        400, "bad_request",
        fmt::format("{} is '{}'; it must be a whole number from {} to {}", what, text, least, most));
  return number;
}

void check_query(const Request& request, const std::set<std::string>& known) {
  for (const auto& [name, value] : request.query)
    if (!known.contains(name))
      throw Problem(400, "bad_request", fmt::format("the query has a parameter '{}' that is not known", name),
                    {.hint = fmt::format("the parameters are {}", fmt::join(known, ", "))});
}

nlohmann::json body_of(const Request& request, const std::set<std::string>& known) {
  nlohmann::json body;
  try {
    body = request.body.empty() ? nlohmann::json::object() : base::parse_json(request.body, "the body");
  } catch (const SessionError& error) {
    throw Problem(400, "bad_request", error.what());
  }
  if (!body.is_object()) throw Problem(400, "bad_request", "the body must be a JSON object");
  for (const auto& [name, value] : body.items())
    if (!known.contains(name))
      throw Problem(400, "bad_request", fmt::format("the body has a field '{}' that is not known", name),
                    {.hint = fmt::format("the fields are {}", fmt::join(known, ", "))});
  return body;
}

}  // namespace accelmgr::service
