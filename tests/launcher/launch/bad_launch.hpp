// A launch that cannot work, and the text of its refusal.
#pragma once

#include "launcher/launch/nodes.hpp"

namespace accelmgr::launch {

/// Expects that the launch is refused: `key` is the option that is wrong, and the error says all `parts`.
inline void expect_refused(const Options& options, const std::string& key,
                           const std::vector<std::string>& parts, const NodeInfo& node_info = cpu_node(2)) {
  SCOPED_TRACE(key + " and " + ::testing::PrintToString(parts));
  const auto [text, wrong] = refusal([&] { resolve(options, node_info); });
  EXPECT_TRUE(says(text, parts));
  EXPECT_EQ(wrong, key);
}

}  // namespace accelmgr::launch
