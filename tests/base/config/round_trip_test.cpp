// to_yaml() and from_yaml() hand a configuration from process to process: nothing may change on the way.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/config/support.hpp"
#include "base/config/table.hpp"

namespace accelmgr::config {
namespace {

// Any bytes: file names are not bound to an encoding.
std::string any_text() { return *rc::gen::container<std::string>(rc::gen::arbitrary<char>()); }

std::string any_name() {
  return *rc::gen::nonEmpty(rc::gen::container<std::string>(rc::gen::arbitrary<char>()));
}

// Any number of the interval. The bits of doubles are drawn, so that denormal numbers and long fractions
// occur.
template <class T>
T any_in(const Interval<T>& interval) {
  if constexpr (std::is_floating_point_v<T>) {
    const auto value = std::bit_cast<double>(*rc::gen::arbitrary<std::uint64_t>());
    if (interval.contains(value)) return value;
    const auto share =
        std::ldexp(static_cast<double>(*rc::gen::inRange<std::int64_t>(1, std::int64_t{1} << 53)), -53);
    return interval.min + (std::min(interval.max, 1e9) - interval.min) * share * 0.999;
  } else {
    if (*rc::gen::inRange(0, 8) == 0) return interval.max;
    const auto value = static_cast<T>(*rc::gen::arbitrary<std::uint64_t>());
    if (interval.contains(value)) return value;
    const auto width =
        static_cast<std::uint64_t>(interval.max) - static_cast<std::uint64_t>(interval.min) + 1;
    return static_cast<T>(interval.min + static_cast<T>(static_cast<std::uint64_t>(value) % width));
  }
}

struct Arbitrary {
  Config& config;

  template <class T>
  void operator()(const Number<T>& number) const {
    number.field(config) = any_in(number.interval);
  }
  void operator()(const Boolean& boolean) const { boolean.field(config) = *rc::gen::arbitrary<bool>(); }
  void operator()(const Choice& choice) const {
    const auto index = *rc::gen::inRange<std::size_t>(0, choice.names.size());
    choice.set(config, index);
    if (choice.argument != nullptr && index + 1 == choice.names.size())
      choice.argument(config) = *rc::gen::element("tokens", "0", "true", "null", "loss/tokens", "-1.5_");
  }
  void operator()(const Text& text) const { text.field(config) = any_text(); }
  void operator()(const TextList& list) const {
    for (int count = *rc::gen::inRange(0, 4); count > 0; --count) list.field(config).push_back(any_text());
  }
  void operator()(const TextMap& map) const {
    for (int count = *rc::gen::inRange(0, 4); count > 0; --count) map.field(config)[any_name()] = any_text();
  }
};

RC_GTEST_PROP(ConfigYaml, GivesBackEveryConfigurationExactly, ()) {
  Config config;
  for (const auto& option : options()) std::visit(Arbitrary{config}, option.kind);
  RC_ASSERT(from_yaml(to_yaml(config)) == config);
}

TEST(ConfigYaml, GivesBackTextThatYamlWouldRead) {
  for (const std::string text :
       {"",         "~",           "null",  "true",   "12", "a: b", "- a", "#no comment",
        " space ",  "line\nbreak", "tab\t", "\"'\\",  "%x", "&a",   "*a",  "ü€",
        "\xff\xfe", "\x04",        "\x7f",  "[a, b]", "---"}) {
    Config config;
    config.model.kind = text;
    config.data.files = {text, text};
    config.model.options["a.b " + text] = text;
    EXPECT_EQ(from_yaml(to_yaml(config)), config) << text;
  }
  Config with_zero_byte;
  with_zero_byte.model.file = std::string("a\0b", 3);
  EXPECT_EQ(from_yaml(to_yaml(with_zero_byte)), with_zero_byte);
}

TEST(ConfigYaml, RefusesValuesThatNoSourceMayGive) {
  auto yaml = to_yaml(Config{});
  const auto at = yaml.find("\"nprocs\": 2");
  ASSERT_NE(at, std::string::npos);
  yaml.replace(at, 11, "\"nprocs\": 0");
  EXPECT_TRUE(says(refusal([&] { from_yaml(yaml); }), {"configuration:1: nprocs is '0'"}));
}

}  // namespace
}  // namespace accelmgr::config
