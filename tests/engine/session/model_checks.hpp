// Tests of models: each keeps its promises, and the explorer finds each wrong turn. Finding no defect means
// something only because it finds those.
#pragma once

#include <gtest/gtest.h>

#include <ostream>

#include "explorer.hpp"

namespace accelmgr::session {

constexpr std::size_t most_states = 10'000'000;

// With sanitizers or without optimization the explorer visits about twenty times fewer states a second.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr bool explores_fast = true;
#else
constexpr bool explores_fast = false;
#endif

/// The same without anything that a deadline does. No promise may depend on one.
template <class Options>
constexpr Options without_deadlines(Options options) {
  options.patient = true;
  return options;
}

/// A case of a parametrized test. Its options say what the model has, and which wrong turn it takes.
template <class Model>
struct ModelCase {
  const char* name;
  typename Model::Options options;
  const char* promise = "";  ///< The promise that the wrong turn breaks first.
  friend void PrintTo(const ModelCase& c, std::ostream* out) { *out << c.name; }
};

template <class Model>
class ModelTest : public testing::TestWithParam<ModelCase<Model>> {
 protected:
  Exploration explore() const {
    const Model model(this->GetParam().options);
    return Explorer(model).explore(most_states);
  }
  void expect_promises_kept() const {
    const auto found = explore();
    fmt::print("{} states, {} steps\n", found.states, found.steps);
    EXPECT_EQ(found.broken, "") << found.trace;
    EXPECT_GT(found.states, 10'000u);
  }
  void expect_wrong_turn_found() const {
    const auto found = explore();
    EXPECT_TRUE(found.broken.starts_with(this->GetParam().promise)) << found.broken << "\n" << found.trace;
    EXPECT_NE(found.trace, "");
  }
};

constexpr auto name_of_case = [](const auto& info) { return info.param.name; };

}  // namespace accelmgr::session
