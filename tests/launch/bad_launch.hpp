// A launch that cannot work, and the text of its refusal.
#pragma once

#include <functional>
#include <ostream>

#include "launch/hosts.hpp"

namespace accelmgr::launch {

struct BadLaunchCase {
  std::string name;
  HostInfo host_info;
  std::function<void(Options&)> change;
  std::string key;  ///< The option that is wrong.
  std::vector<std::string> says;
};

inline void PrintTo(const BadLaunchCase& c, std::ostream* out) { *out << c.name; }

inline void expect_refusal(const BadLaunchCase& expected) {
  Options options;
  expected.change(options);
  const auto [text, key] = refusal([&] { resolve(options, expected.host_info); });
  EXPECT_TRUE(says(text, expected.says));
  EXPECT_EQ(key, expected.key);
}

inline const auto nothing = [](Options&) {};

}  // namespace accelmgr::launch
