#include <fmt/format.h>

#include <exception>

#include "accelmgr/distributed_context.hpp"
#include "base/log.hpp"

namespace accelmgr::distributed {

OneRankFirst::OneRankFirst(int rank, bool local) : exceptions_(std::uncaught_exceptions()) {
  const int size = local ? get_nproc_per_node() : get_world_size();
  if (rank < 0 || rank >= size)
    throw ConfigError(fmt::format("rank should be between 0 and {}, but given {}", size - 1, rank));
  first_ = rank == (local ? get_local_rank() : get_rank());
  if (!first_) barrier();
}

// Releases the other ranks even if this rank's work has thrown.
OneRankFirst::~OneRankFirst() noexcept(false) {
  if (!first_) return;
  if (std::uncaught_exceptions() <= exceptions_) {
    barrier();
    return;
  }
  try {
    barrier();
  } catch (const std::exception& error) {
    base::log().warn("one_rank_first: the other ranks could not be released: {}", error.what());
  }
}

}  // namespace accelmgr::distributed
