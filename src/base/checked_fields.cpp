#include "base/checked_fields.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"

namespace accelmgr::base {
namespace {

using nlohmann::json;

/// Stops the parser where lists or objects are nested too deep: the CBOR parser is recursive.
struct Depth final : nlohmann::json_sax<json> {
  int depth = 0;
  bool open() { return ++depth <= max_nesting; }
  bool close() { return --depth >= 0; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override { return false; }
};

template <class Parse>
json parse(std::string_view bytes, const std::string& what, json::input_format_t format, Parse parse) {
  try {
    Depth nesting;
    const bool may_be_deep = bytes.size() > max_nesting;
    if (may_be_deep) json::sax_parse(bytes.begin(), bytes.end(), &nesting, format);
    if (nesting.depth > max_nesting)
      throw SessionError(fmt::format("{} is nested deeper than {} levels", what, max_nesting));
    return parse(bytes);
  } catch (const json::exception& error) {
    throw SessionError(fmt::format("{} cannot be read ({} bytes): {}", what, bytes.size(), error.what()));
  }
}

std::string shown(const json& value) {
  constexpr std::size_t most = 80;
  if (value.is_structured()) return fmt::format("{} of {} entries", value.type_name(), value.size());
  if (value.is_binary()) return fmt::format("{} bytes", value.get_binary().size());
  if (!value.is_string()) return value.dump();
  const auto text = json_text(value.get_ref<const std::string&>().substr(0, most));
  return value.get_ref<const std::string&>().size() > most ? text + "..." : text;
}

[[noreturn]] void refuse_value(const std::string& what, const char* field, const json& value,
                               const std::string& right) {
  throw SessionError(fmt::format("{}: '{}' is {}; it must be {}", what, field, shown(value), right));
}

}  // namespace

std::string json_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

json parse_json(std::string_view text, const std::string& what) {
  return parse(text, what, json::input_format_t::json, [](std::string_view t) { return json::parse(t); });
}

json parse_cbor(std::string_view bytes, const std::string& what) {
  return parse(bytes, what, json::input_format_t::cbor,
               [](std::string_view b) { return json::from_cbor(b.begin(), b.end()); });
}

Fields::Fields(const json& object, std::string what) : object_(&object), what_(std::move(what)) {
  if (!object.is_object())
    throw SessionError(fmt::format("{} is {}; it must be an object with fields", what_, shown(object)));
}

const json& Fields::value(const char* field) const {
  const auto found = object_->find(field);
  if (found == object_->end()) throw SessionError(fmt::format("{}: the field '{}' is missing", what_, field));
  return *found;
}

bool Fields::has(const char* field) const { return object_->contains(field); }

void Fields::refuse(const char* field, const std::string& right) const {
  refuse_value(what_, field, value(field), right);
}

std::int64_t Fields::signed_number(const json& value, const char* field, std::int64_t least,
                                   std::int64_t most) const {
  const bool fits = value.is_number_unsigned()
                        ? value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max()
                        : value.is_number_integer();
  if (!fits || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most)
    refuse_value(what_, field, value, fmt::format("an integer from {} to {}", least, most));
  return value.get<std::int64_t>();
}

std::uint64_t Fields::unsigned_number(const json& value, const char* field, std::uint64_t least,
                                      std::uint64_t most) const {
  const bool fits =
      value.is_number_unsigned() || (value.is_number_integer() && value.get<std::int64_t>() >= 0);
  if (!fits || value.get<std::uint64_t>() < least || value.get<std::uint64_t>() > most)
    refuse_value(what_, field, value, fmt::format("an integer from {} to {}", least, most));
  return value.get<std::uint64_t>();
}

double Fields::real(const char* field) const {
  const auto& number = value(field);
  if (!number.is_number() || !std::isfinite(number.get<double>())) refuse(field, "a finite number");
  return number.get<double>();
}

bool Fields::flag(const char* field) const {
  if (!value(field).is_boolean()) refuse(field, "true or false");
  return value(field).get<bool>();
}

std::string Fields::text(const char* field) const {
  if (!value(field).is_string()) refuse(field, "a string");
  return value(field).get<std::string>();
}

std::vector<std::string> Fields::texts(const char* field) const {
  std::vector<std::string> texts;
  for (const auto* entry : entries(field, std::numeric_limits<std::size_t>::max())) {
    if (!entry->is_string()) refuse_value(what_, field, *entry, "a list of strings");
    texts.push_back(entry->get<std::string>());
  }
  return texts;
}

std::vector<const json*> Fields::entries(const char* field, std::size_t most) const {
  const auto& list = value(field);
  if (!list.is_array() || list.size() > most)
    refuse(field, most == std::numeric_limits<std::size_t>::max()
                      ? "a list"
                      : fmt::format("a list of at most {} entries", most));
  std::vector<const json*> entries;
  for (const auto& entry : list) entries.push_back(&entry);
  return entries;
}

std::vector<Fields> Fields::objects(const char* field, std::size_t most_entries) const {
  std::vector<Fields> objects;
  for (const auto* entry : entries(field, most_entries))
    objects.emplace_back(*entry, fmt::format("{}: {}[{}]", what_, field, objects.size()));
  return objects;
}

Fields Fields::object(const char* field) const {
  return Fields(value(field), fmt::format("{}: {}", what_, field));
}

}  // namespace accelmgr::base
