#include "base/config/option.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <type_traits>

#include "accelmgr/errors.hpp"
#include "base/did_you_mean.hpp"
#include "base/parse_number.hpp"

namespace accelmgr::config {
namespace {

template <class... Fs>
struct Overload : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overload(Fs...) -> Overload<Fs...>;

template <class T>
std::string in_words(const Interval<T>& interval) {
  const bool has_max = interval.max != std::numeric_limits<T>::max();
  const bool has_min = std::is_unsigned_v<T> || interval.min != std::numeric_limits<T>::lowest();
  std::string words = std::is_floating_point_v<T> ? "a number" : "a whole number";
  if (has_min && has_max && !interval.above_min && !interval.below_max)
    return fmt::format("{} from {} to {}{}", words, interval.min, interval.max,
                       interval.also ? fmt::format(", or {}", *interval.also) : "");
  if (has_min) words += fmt::format(" {} {}", interval.above_min ? "above" : "of at least", interval.min);
  if (has_min && has_max) words += " and";
  if (has_max) words += fmt::format(" {} {}", interval.below_max ? "below" : "of at most", interval.max);
  return words;
}

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string as_written(const RawValue& value) {
  if (value.form == RawValue::Form::list) return fmt::format("a list ({})", fmt::join(value.items, ", "));
  return fmt::format("{}'{}'", value.form == RawValue::Form::quoted ? "the string " : "",
                     value.items.front());
}

// "sum_over(" for a choice whose last name is "sum_over(FIELD)".
std::string before_argument(const Choice& choice) {
  const auto& name = choice.names.back();
  return name.substr(0, name.find('(') + 1);
}

// The word in `text`, "sum_over(word)", which may be quoted. Only characters that no source needs to quote.
std::optional<std::string> argument_in(const Choice& choice, std::string_view text) {
  const auto begin = before_argument(choice);
  if (!text.starts_with(begin) || !text.ends_with(')')) return std::nullopt;
  text = text.substr(begin.size(), text.size() - begin.size() - 1);
  if (text.size() > 1 && text.front() == text.back() && (text.front() == '"' || text.front() == '\''))
    text = text.substr(1, text.size() - 2);
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("_-./").find(c) != std::string_view::npos;
  };
  if (text.empty() || !std::ranges::all_of(text, is_plain)) return std::nullopt;
  return std::string(text);
}

bool store_choice(const Choice& choice, const std::string& text, Config& config) {
  const auto last = choice.names.size() - 1;
  auto index = static_cast<std::size_t>(std::ranges::find(choice.names, text) - choice.names.begin());
  std::optional<std::string> argument;
  if (choice.argument != nullptr && index >= last) {
    if (!(argument = argument_in(choice, text)) || text == choice.names.back()) return false;
    index = last;
  }
  if (index > last) return false;
  choice.set(config, index);
  if (choice.argument != nullptr) choice.argument(config) = argument.value_or("");
  return true;
}

std::string name_in(const Choice& choice, const Config& config) {
  const auto index = choice.get(config);
  if (choice.argument == nullptr || index + 1 < choice.names.size()) return choice.names.at(index);
  return fmt::format("{}{})", before_argument(choice), read(choice.argument, config));
}

// Stores the word `text` if the option takes it. Returns whether it does.
bool store_word(const Option& option, const std::string& text, Config& config) {
  return std::visit(Overload{
                        [&]<class T>(const Number<T>& number) {
                          const auto parsed = base::parse_number<T>(text);
                          if (!parsed || !number.interval.contains(*parsed)) return false;
                          number.field(config) = *parsed;
                          return true;
                        },
                        [&](const Boolean& boolean) {
                          if (text != "true" && text != "false") return false;
                          boolean.field(config) = text == "true";
                          return true;
                        },
                        [&](const Choice& choice) { return store_choice(choice, text, config); },
                        [](const auto&) { return false; },
                    },
                    option.kind);
}

// For a number too large for its type: text with the largest value, if allowed() states no bound.
std::string about_number(const Option& option, const RawValue& value) {
  if (value.form != RawValue::Form::plain) return "";
  const auto beyond = [&]<class T>(const Number<T>& number) {
    const auto& text = value.items.front();
    T parsed{};
    const auto end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, parsed);
    const bool is_open = number.interval.max == std::numeric_limits<T>::max();
    return result.ec == std::errc::result_out_of_range && result.ptr == end && is_open
               ? fmt::format(" and of at most {}", number.interval.max)
               : std::string();
  };
  return std::visit(Overload{beyond, [](const auto&) { return std::string(); }}, option.kind);
}

// Text with the reason why a name is refused, or with the name that was probably meant.
std::string about_choice(const Option& option, const RawValue& value) {
  const auto* choice = std::get_if<Choice>(&option.kind);
  if (choice == nullptr || value.form == RawValue::Form::list) return "";
  const auto& name = value.items.front();
  if (const auto reason = choice->refused.find(name); reason != choice->refused.end())
    return fmt::format(" ('{}' is refused: {})", name, reason->second);
  return base::did_you_mean(lower_case(name), choice->names);
}

bool store(const Option& option, const std::string& key, const RawValue& value, Config& config) {
  const bool is_list = value.form == RawValue::Form::list;
  if (const auto* list = std::get_if<TextList>(&option.kind)) {
    list->field(config) = value.items;
    return true;
  }
  if (is_list) return false;
  if (const auto* text = std::get_if<Text>(&option.kind)) {
    text->field(config) = value.items.front();
    return true;
  }
  if (const auto* map = std::get_if<TextMap>(&option.kind)) {
    if (key.size() <= option.key.size() + 1) return false;
    map->field(config)[key.substr(option.key.size() + 1)] = value.items.front();
    return true;
  }
  return value.form == RawValue::Form::plain && store_word(option, value.items.front(), config);
}

}  // namespace

// Bytes from 0x80 on are not escaped: a file name need not be valid UTF-8, and an escape in YAML is a code
// point, not a byte.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else if (byte < 0x20 || byte == 0x7f)
      out += fmt::format("\\x{:02x}", byte);
    else
      out += c;
  }
  return out += '"';
}

std::string allowed(const Option& option) {
  return std::visit(
      Overload{
          []<class T>(const Number<T>& number) { return in_words(number.interval); },
          [](const Boolean&) { return std::string("true or false"); },
          [](const Choice& choice) { return fmt::format("{}", fmt::join(choice.names, " or ")); },
          [](const Text&) { return std::string("a string"); },
          [](const TextList&) { return std::string("a list of strings"); },
          [&](const TextMap&) { return fmt::format("one string for each {}.NAME", option.key); },
      },
      option.kind);
}

void assign(const Option& option, const std::string& key, const RawValue& value, const std::string& subject,
            Config& config) {
  if (store(option, key, value, config)) return;
  throw ConfigError(fmt::format("{} is {}; it must be {}{}{}", subject, as_written(value), allowed(option),
                                about_number(option, value), about_choice(option, value)),
                    key);
}

void check(const Option& option, const Config& config) {
  std::visit(
      Overload{
          [&]<class T>(const Number<T>& number) {
            const T value = read(number.field, config);
            if (!number.interval.contains(value))
              throw ConfigError(fmt::format("{} is {}; it must be {}", option.key, value, allowed(option)),
                                option.key);
          },
          [&](const Choice& choice) {
            const auto value = choice.get(config);
            if (value >= choice.names.size())
              throw ConfigError(
                  fmt::format("{} is enumerator {}; it must be {}", option.key, value, allowed(option)),
                  option.key);
            const auto name = name_in(choice, config);
            if (Config other; !store_choice(choice, name, other))
              throw ConfigError(fmt::format("{} is '{}'; it must be {}", option.key, name, allowed(option)),
                                option.key);
          },
          [&](const TextMap& map) {
            if (read(map.field, config).contains(""))
              throw ConfigError(fmt::format("{} has an entry without a name", option.key), option.key);
          },
          [](const auto&) {},
      },
      option.kind);
}

std::vector<std::pair<std::string, std::string>> entries(const Option& option, const Config& config) {
  const auto one = [&](std::string value) {
    return std::vector<std::pair<std::string, std::string>>{{option.key, std::move(value)}};
  };
  return std::visit(
      Overload{
          [&]<class T>(const Number<T>& number) {
            return one(fmt::format("{}", read(number.field, config)));
          },
          [&](const Boolean& boolean) { return one(read(boolean.field, config) ? "true" : "false"); },
          [&](const Choice& choice) { return one(name_in(choice, config)); },
          [&](const Text& text) { return one(quoted(read(text.field, config))); },
          [&](const TextList& list) {
            std::vector<std::string> items;
            for (const auto& item : read(list.field, config)) items.push_back(quoted(item));
            return one(fmt::format("[{}]", fmt::join(items, ", ")));
          },
          [&](const TextMap& map) {
            std::vector<std::pair<std::string, std::string>> all;
            for (const auto& [name, value] : read(map.field, config))
              all.emplace_back(option.key + "." + name, quoted(value));
            return all;
          },
      },
      option.kind);
}

}  // namespace accelmgr::config
