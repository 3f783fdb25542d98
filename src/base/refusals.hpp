// Logs refused messages more and more rarely, so that a flood of them does not fill the log.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "base/log.hpp"

namespace accelmgr::base {

/// One object for each source of messages. Used by one thread at a time.
class Refusals {
 public:
  /// Logs the 1st, the 2nd, the 4th, the 8th refusal and so on.
  void note(std::string_view why) {
    if (std::has_single_bit(++count_)) log().warn("refused a message ({} so far): {}", count_, why);
  }

 private:
  std::uint64_t count_ = 0;
};

}  // namespace accelmgr::base
