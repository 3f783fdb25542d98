// One option of the configuration: its key, its field in Config, and the values that it takes. Sources,
// printing, validation and documentation use this type alone: none of them names an option.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

/// A value as it stands in a source, before it has a type.
struct RawValue {
  enum class Form {
    plain,   ///< One unquoted word: may become any type.
    quoted,  ///< One quoted word of YAML: always text.
    list,
  };
  Form form = Form::plain;
  std::vector<std::string> items;  ///< Exactly one unless `form` is list.
};

/// Returns the field of a Config that an option stands for. Not const, because it serves reads and writes.
template <class T>
using Field = T& (*)(Config&);

template <class T>
const T& read(Field<T> field, const Config& config) {
  return field(const_cast<Config&>(config));
}

/// The values from `min` to `max`. `above_min` and `below_max` exclude the bound itself. `also`: one more
/// value, with a meaning of its own.
template <class T>
struct Interval {
  T min = std::numeric_limits<T>::lowest();
  T max = std::numeric_limits<T>::max();
  bool above_min = false;
  bool below_max = false;
  std::optional<T> also = {};

  /// False for a NaN and for the infinities.
  bool contains(T value) const {
    return value == also ||
           ((above_min ? value > min : value >= min) && (below_max ? value < max : value <= max));
  }
};

template <class T>
struct Number {
  Field<T> field;
  Interval<T> interval;
};

struct Boolean {
  Field<bool> field;
};

/// An enumerator of an enum that counts from 0. `names` are in the order of the enumerators.
struct Choice {
  std::vector<std::string> names;
  std::function<std::size_t(const Config&)> get;
  std::function<void(Config&, std::size_t)> set;
  std::map<std::string, std::string> refused =
      {};  ///< Names that users may expect here, each with the reason why it is refused.
  /// Not null: the last name, `sum_over(FIELD)`, takes a word in place of FIELD, which is stored here.
  Field<std::string> argument = nullptr;
};

struct Text {
  Field<std::string> field;
};

struct TextList {
  Field<std::vector<std::string>> field;
};

/// A map with names of the user's choice: the option `model.options` takes every key `model.options.NAME`.
struct TextMap {
  Field<std::map<std::string, std::string>> field;
};

struct Option {
  using Kind = std::variant<Number<int>, Number<std::int64_t>, Number<std::uint64_t>, Number<double>, Boolean,
                            Choice, Text, TextList, TextMap>;
  std::string key;  ///< Dotted: `optimizer.kind`.
  Kind kind;
  std::string help;

  bool is_map() const { return std::holds_alternative<TextMap>(kind); }
  bool is_list() const { return std::holds_alternative<TextList>(kind); }
};

/// The values that the option takes, as text that completes "it must be ...".
std::string allowed(const Option& option);

/// Stores `value` in `config`. `key` is the key of the option, or of an entry if it is a map. Throws
/// ConfigError: "`subject` is 'abc'; it must be ...". `subject` is a place and the key, or the command-line
/// option that was typed.
void assign(const Option& option, const std::string& key, const RawValue& value, const std::string& subject,
            Config& config);

/// Throws ConfigError if the value in `config` is not allowed. Needed for a Config that a program has built
/// itself, without assign().
void check(const Option& option, const Config& config);

/// `text` as one line of YAML, from which a reader gets the same bytes.
std::string quoted(std::string_view text);

/// Keys of the option with their values as one line of YAML each: one pair, or one for each entry of a map.
/// Doubles and strings keep every bit.
std::vector<std::pair<std::string, std::string>> entries(const Option& option, const Config& config);

}  // namespace accelmgr::config
