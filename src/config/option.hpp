// One option of the configuration: what it is called, where its value lives in Config, and which values it
// takes. Sources, printing, validation and documentation are all written against this type; none of them
// names an option.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

/// A value as a source gives it, before it has a type.
struct RawValue {
  enum class Form {
    plain,   ///< One bare word: may become any type.
    quoted,  ///< One quoted word of YAML: text, never a number.
    list,
  };
  Form form = Form::plain;
  std::vector<std::string> items;  ///< Exactly one unless `form` is list.
};

/// The field of a Config that an option stands for. Reading goes through it as well, hence no const.
template <class T>
using Field = T& (*)(Config&);

template <class T>
const T& read(Field<T> field, const Config& config) {
  return field(const_cast<Config&>(config));
}

/// From `min` to `max`; `above_min` and `below_max` leave the bound itself out.
template <class T>
struct Interval {
  T min = std::numeric_limits<T>::lowest();
  T max = std::numeric_limits<T>::max();
  bool above_min = false;
  bool below_max = false;

  /// False for a NaN and for the infinities.
  bool contains(T value) const {
    return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
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

/// One of the enumerators of an enum that counts from 0; `names` are in their order.
struct Choice {
  std::vector<std::string> names;
  std::function<std::size_t(const Config&)> get;
  std::function<void(Config&, std::size_t)> set;
  std::map<std::string, std::string> refused =
      {};  ///< Names people expect here, with the reason why there is none.
};

struct Text {
  Field<std::string> field;
};

struct TextList {
  Field<std::vector<std::string>> field;
};

/// A map whose names are the user's: the option `model.options` takes every key `model.options.NAME`.
struct TextMap {
  Field<std::map<std::string, std::string>> field;
};

struct Option {
  using Kind = std::variant<Number<int>, Number<std::int64_t>, Number<std::uint64_t>, Number<double>, Boolean,
                            Choice, Text, TextList, TextMap>;
  std::string key;  ///< Dotted.
  Kind kind;
  std::string help;

  bool is_map() const { return std::holds_alternative<TextMap>(kind); }
  bool is_list() const { return std::holds_alternative<TextList>(kind); }
};

/// Which values the option takes, as the end of "it must be ...".
std::string allowed(const Option& option);

/// Stores `value`. `key` is the option's, or lies below it when it is a map. Throws ConfigError: "`subject`
/// is 'abc'; it must be ...". `subject` is a place and the key, or the option of a command that was typed.
void assign(const Option& option, const std::string& key, const RawValue& value, const std::string& subject,
            Config& config);

/// Throws ConfigError if the value in `config` is not allowed (a Config that a program built has met no
/// source).
void check(const Option& option, const Config& config);

/// `text` as one line that a YAML reader gives back byte for byte.
std::string quoted(std::string_view text);

/// The option's keys and their values as YAML of one line: one pair, or one for each name of a map. Doubles
/// and strings keep every bit.
std::vector<std::pair<std::string, std::string>> entries(const Option& option, const Config& config);

}  // namespace accelmgr::config
