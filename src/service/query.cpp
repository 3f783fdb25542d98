#include "service/query.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

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

}  // namespace accelmgr::service
