#include "engine/manager/source_watch.hpp"
#include "base/timing.hpp"

#include <fmt/format.h>

namespace accelmgr::manager {

std::optional<std::string> SourceWatch::look(const std::optional<data::Reading>& reading,
                                             std::int64_t now_ns) {
  if (!reading || reading->since_ns == told_of_ns_) return std::nullopt;
  const double since_s = double(now_ns - reading->since_ns) / 1e9;
  if (since_s < timing::source_patience_s) return std::nullopt;
  const auto ranks = waiting_ranks();
  if (ranks.empty()) return std::nullopt;
  told_of_ns_ = reading->since_ns;
  return fmt::format(
      "the data source '{}' has not returned from {} for {:.0f} s (element {}); waiting for it: {}", kind_,
      reading->what, since_s, reading->element, ranks);
}

std::string SourceWatch::waiting_ranks() const {
  const auto word = session_.word();
  if (word.closed || word.abort) return {};
  std::string ranks;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    const bool waits = (session_.control().request.participants >> rank & 1) != 0 &&
                       session_.record(rank).phase.load() == session::Phase::data;
    if (waits) ranks += fmt::format("{}rank {}", ranks.empty() ? "" : ", ", rank);
  }
  return ranks;
}

}  // namespace accelmgr::manager
