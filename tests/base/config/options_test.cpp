// Checks that the table of options agrees with the structs of Config: every field has an option, and every
// option sets its own field alone.
#if __has_include(<boost/pfr.hpp>)
#include <boost/pfr.hpp>
#endif

#include "base/config/support.hpp"
#include "base/config/table.hpp"

namespace accelmgr::config {
namespace {

#if __has_include(<boost/pfr.hpp>)
template <class T>
constexpr bool is_section_struct = std::is_class_v<T>&& std::is_aggregate_v<T>;

std::size_t count_fields(const auto& section) {
  std::size_t fields = 0;
  boost::pfr::for_each_field(section, [&](const auto& field) {
    if constexpr (is_section_struct<std::remove_cvref_t<decltype(field)>>)
      fields += count_fields(field);
    else
      ++fields;
  });
  return fields;
}

TEST(ConfigTable, HasEveryFieldOfConfig) { EXPECT_EQ(options().size(), count_fields(Config{})); }
#else
TEST(ConfigTable, HasEveryFieldOfConfig) {
  GTEST_SKIP() << "Boost before 1.75 cannot list the fields of a struct";
}
#endif

// A value that the option takes and that is not its default.
std::string another_value(const Option& option) {
  const auto values = entries(option, Config{});
  if (option.is_map() || option.is_list()) return "other";
  for (const auto* candidate : {"true", "false", "0.25", "9", "bf16", "float32", "mean", "samples", "keep",
                                "fail", "sgd", "cosine", "fork", "xla", "measured", "off", "auto"}) {
    if (candidate == values.front().second) continue;
    Config config;
    try {
      assign(option, option.key, {RawValue::Form::plain, {candidate}}, "test", config);
      return candidate;
    } catch (const ConfigError&) {
      continue;
    }
  }
  return "";
}

TEST(ConfigTable, TakesAWordInAChoice) {
  for (const auto* text : {"sum_over(tokens)", "sum_over(\"tokens\")", "sum_over('tokens')"}) {
    const auto loaded = load_text(std::string("loss_scaling: ") + text);
    EXPECT_EQ(loaded.config.loss_scaling, LossScaling(LossScaling::sum_over, "tokens")) << text;
    EXPECT_EQ(load_config("", {}, {{"ACCELMGR_LOSS_SCALING", text}}).config, loaded.config) << text;
    EXPECT_EQ(load_text("loss_scaling: samples", {std::string("loss_scaling=") + text}).config, loaded.config)
        << text;
  }
  const auto over = load_text("loss_scaling: sum_over(tokens)", {"loss_scaling=sum"});
  EXPECT_EQ(over.config.loss_scaling, LossScaling::sum) << "the word goes with its name";
  for (const auto* text :
       {"sum_over", "sum_over()", "sum_over(FIELD", "sum_over(a b)", "sum_over(\"\")", "sums"})
    EXPECT_TRUE(says(refusal([&] { load_config("", Sets{std::string("loss_scaling=") + text}, {}); }),
                     {"loss_scaling is '", "it must be runners or samples or sum or sum_over(FIELD)"}))
        << text;
  Config made;
  made.loss_scaling = LossScaling::sum_over;
  EXPECT_TRUE(says(refusal([&] { validate(made); }), {"loss_scaling is 'sum_over()'; it must be"}));
}

TEST(ConfigTable, SetsOfEachOptionItsOwnFieldAlone) {
  const Config defaults;
  for (const auto& option : options()) {
    const auto key = option.is_map() ? option.key + ".name" : option.key;
    Config config;
    assign(option, key, {RawValue::Form::plain, {another_value(option)}}, "test", config);
    for (const auto& other : options())
      EXPECT_EQ(entries(other, config) == entries(other, defaults), other.key != option.key)
          << other.key << " after setting " << option.key;
  }
}

TEST(ConfigTable, FindsEveryOptionByItsKey) {
  for (const auto& option : options()) EXPECT_EQ(find_option(option.key), &option);
  EXPECT_EQ(find_option("model.options.any.name")->key, "model.options");
  EXPECT_EQ(find_option("model"), nullptr);
}

TEST(ConfigReference, TellsOfEveryOptionItsTypeDefaultAndHelp) {
  const auto text = reference();
  for (const auto& option : options()) {
    const auto start = text.find("\n" + option.key);
    ASSERT_NE(start, std::string::npos) << option.key;
    const auto entry = text.substr(start, text.find("\n\n", start) - start);
    EXPECT_NE(entry.find(option.help), std::string::npos) << option.key;
    EXPECT_NE(entry.find(allowed(option) + "; default "), std::string::npos) << option.key;
  }
}

}  // namespace
}  // namespace accelmgr::config
