// Says when ranks wait for a data source that does not come back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/reading.hpp"
#include "session/session.hpp"

namespace accelmgr::manager {

/// An agent: look() is called in regular intervals. Used by one thread.
class SourceWatch {
 public:
  /// `kind`: what the configuration calls the source.
  SourceWatch(const session::Session& session, std::string kind)
      : session_(session), kind_(std::move(kind)) {}

  static constexpr double patience_s = 5.0;

  /// What is to be said now: once for each read that takes longer than patience_s, and only where a rank
  /// waits for it in a step. A source that has nothing to give between steps holds up nobody.
  std::optional<std::string> look(const std::optional<data::Reading>& reading, std::int64_t now_ns);

 private:
  std::string waiting_ranks() const;

  const session::Session& session_;
  std::string kind_;
  std::int64_t told_of_ns_ = 0;  ///< The beginning of the last read that something was said of.
};

}  // namespace accelmgr::manager
