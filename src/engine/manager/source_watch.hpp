// Reports when ranks wait for a data source that does not return.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/data/reading.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::manager {

/// The caller calls look() at regular intervals. Used by one thread.
class SourceWatch {
 public:
  /// `kind` is `data.kind`, for the text.
  SourceWatch(const session::Session& session, std::string kind)
      : session_(session), kind_(std::move(kind)) {}

  /// Returns a warning once for each read that takes longer than timing::source_patience_s while a rank waits
  /// for it in an attempt. Between attempts a slow source delays nothing, and nullopt is returned.
  std::optional<std::string> look(const std::optional<data::Reading>& reading, std::int64_t now_ns);

 private:
  std::string waiting_ranks() const;

  const session::Session& session_;
  std::string kind_;
  std::int64_t told_of_ns_ = 0;  ///< When the read began that was reported last.
};

}  // namespace accelmgr::manager
