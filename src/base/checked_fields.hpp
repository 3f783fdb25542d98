// Checked reading of messages and files: every field is checked before it becomes a value. A value that a
// Fields reader returns has its type and is within its range. It needs no further check.
//
//   const auto message = base::parse_json(bytes, "a request of the host");
//   const base::Fields fields(message, "a request of the host");
//   const auto ranks = fields.number<int>("ranks", 1, session::max_ranks);
//
// All functions throw SessionError. Its text names the message, the field, its value and the right values.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace accelmgr::base {

/// Levels of nested lists and objects. Deeper text is refused, because copying and encoding it use the stack.
inline constexpr int max_nesting = 256;

/// `what` names the message: "a request of the host".
nlohmann::json parse_json(std::string_view text, const std::string& what);
nlohmann::json parse_cbor(std::string_view bytes, const std::string& what);

/// One line of JSON. Bytes that are no UTF-8, as text of user code may have, are replaced.
std::string json_text(const nlohmann::json& value);

/// The fields of one object, which must outlive the reader.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string what);

  /// An integer from `least` to `most`.
  template <std::integral T>
  T number(const char* field, T least = std::numeric_limits<T>::min(),
           T most = std::numeric_limits<T>::max()) const {
    return number_of(value(field), field, least, most);
  }
  /// A list of at most `most_entries` integers from `least` to `most`.
  template <std::integral T>
  std::vector<T> numbers(const char* field, T least = std::numeric_limits<T>::min(),
                         T most = std::numeric_limits<T>::max(),
                         std::size_t most_entries = std::numeric_limits<std::size_t>::max()) const {
    std::vector<T> numbers;
    for (const auto* entry : entries(field, most_entries))
      numbers.push_back(number_of(*entry, field, least, most));
    return numbers;
  }
  double real(const char* field) const;  ///< A finite number.
  bool flag(const char* field) const;
  std::string text(const char* field) const;
  std::vector<std::string> texts(const char* field) const;
  /// One reader for each object of a list.
  std::vector<Fields> objects(const char* field,
                              std::size_t most_entries = std::numeric_limits<std::size_t>::max()) const;
  Fields object(const char* field) const;
  const nlohmann::json& value(const char* field) const;  ///< Of any type.
  bool has(const char* field) const;

  /// Throws because the caller finds the value of `field` wrong. `right` completes "it must be".
  [[noreturn]] void refuse(const char* field, const std::string& right) const;

 private:
  template <std::integral T>
  T number_of(const nlohmann::json& value, const char* field, T least, T most) const {
    if constexpr (std::is_signed_v<T>)
      return static_cast<T>(signed_number(value, field, least, most));
    else
      return static_cast<T>(unsigned_number(value, field, least, most));
  }
  std::int64_t signed_number(const nlohmann::json& value, const char* field, std::int64_t least,
                             std::int64_t most) const;
  std::uint64_t unsigned_number(const nlohmann::json& value, const char* field, std::uint64_t least,
                                std::uint64_t most) const;
  std::vector<const nlohmann::json*> entries(const char* field, std::size_t most) const;

  const nlohmann::json* object_;
  std::string what_;
};

}  // namespace accelmgr::base
