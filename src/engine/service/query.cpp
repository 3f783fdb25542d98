#include "engine/service/query.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/parse_number.hpp"

namespace accelmgr::service {

std::uint64_t whole_number(const std::string& text, const std::string& what, std::uint64_t least,
                           std::uint64_t most) {
  const auto number = base::parse_number<std::uint64_t>(text);
  if (!number || *number < least || *number > most)
    throw Problem(
        400, "bad_request",
        fmt::format("{} is '{}'; it must be a whole number from {} to {}", what, text, least, most));
  return *number;
}

namespace {

/// Throws Problem for a name that is not known, and for one that is missing. `where`: "the query".
template <class Has>
void check_names(const std::string& where, const std::vector<std::string>& given,
                 const std::vector<Parameter>& known, Has&& has) {
  std::vector<std::string> names;
  names.reserve(known.size());
  for (const auto& parameter : known) names.emplace_back(parameter.name);
  for (const auto& name : given)
    if (std::ranges::find(names, name) == names.end())
      throw Problem(
          400, "bad_request", fmt::format("{} has a parameter '{}' that is not known", where, name),
          {.hint = names.empty() ? "it takes none" : fmt::format("it takes {}", fmt::join(names, ", "))});
  for (const auto& parameter : known)
    if (parameter.required && !has(parameter.name))
      throw Problem(400, "bad_request",
                    fmt::format("{} lacks '{}': {}", where, parameter.name, parameter.meaning));
}

void check(const base::Fields& fields, const Parameter& parameter) {
  switch (parameter.type) {
    case Parameter::Type::integer:
      fields.number<std::uint64_t>(parameter.name, parameter.least, parameter.most);
      break;
    case Parameter::Type::number:
      if (const auto value = fields.real(parameter.name);
          value < double(parameter.least) || value > double(parameter.most))
        fields.refuse(parameter.name, fmt::format("from {} to {}", parameter.least, parameter.most));
      break;
    case Parameter::Type::flag:
      fields.flag(parameter.name);
      break;
    case Parameter::Type::position:
    case Parameter::Type::place:
      fields.text(parameter.name);
      break;
  }
}

}  // namespace

void check_query(const Request& request, const std::vector<Parameter>& known) {
  std::vector<std::string> given;
  for (const auto& [name, value] : request.query) given.push_back(name);
  check_names("the query", given, known, [&](const char* name) { return request.query.contains(name); });
  for (const auto& parameter : known)
    if (const auto found = request.query.find(parameter.name);
        found != request.query.end() && parameter.type == Parameter::Type::integer)
      whole_number(found->second, parameter.name, parameter.least, parameter.most);
}

std::uint64_t number_in(const Request& request, const char* name, std::uint64_t otherwise) {
  const auto found = request.query.find(name);
  return found == request.query.end() ? otherwise : whole_number(found->second, name, 0, most_steps);
}

nlohmann::json checked_body(const Request& request, const std::vector<Parameter>& known) {
  try {
    auto body = request.body.empty() ? nlohmann::json::object() : base::parse_json(request.body, "the body");
    if (!body.is_object()) throw Problem(400, "bad_request", "the body must be a JSON object");
    std::vector<std::string> given;
    for (const auto& [name, value] : body.items()) given.push_back(name);
    check_names("the body", given, known, [&](const char* name) { return body.contains(name); });
    for (const auto& parameter : known)  // To JSON Schema 2.0 is an integer.
      if (const auto found = body.find(parameter.name);
          found != body.end() && parameter.type == Parameter::Type::integer && found->is_number_float())
        if (const auto whole = std::trunc(found->get<double>()); whole == *found && std::abs(whole) < 1e15)
          *found = static_cast<std::int64_t>(whole);
    const base::Fields fields(body, "the body");
    for (const auto& parameter : known)
      if (body.contains(parameter.name)) check(fields, parameter);
    return body;
  } catch (const SessionError& error) {
    throw Problem(400, "bad_request", error.what());
  }
}

}  // namespace accelmgr::service
