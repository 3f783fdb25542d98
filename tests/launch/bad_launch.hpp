// A launch that cannot be, and what its refusal says.
#pragma once

#include <functional>
#include <ostream>

#include "launch/machines.hpp"

namespace accelmgr::launch {

struct BadLaunchCase {
  std::string name;
  Machine machine;
  std::function<void(Options&)> change;
  std::string key;  ///< The option at fault.
  std::vector<std::string> says;
};

inline void PrintTo(const BadLaunchCase& c, std::ostream* out) { *out << c.name; }

inline void expect_refusal(const BadLaunchCase& expected) {
  Options options;
  expected.change(options);
  const auto [text, key] = refusal([&] { resolve(options, expected.machine); });
  EXPECT_TRUE(says(text, expected.says));
  EXPECT_EQ(key, expected.key);
}

inline const auto nothing = [](Options&) {};

}  // namespace accelmgr::launch
