// The steps that make up a call of Hierarchical, for the files that implement it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/clock.hpp"
#include "base/timing.hpp"
#include "launcher/collective/nodes/hierarchical.hpp"

namespace accelmgr::collective {

inline std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

inline CallOptions until(base::Deadline deadline, std::int64_t margin_ns) {
  const auto ns = std::max<std::int64_t>(deadline.remaining_ns() + margin_ns, 1'000'000);
  return {.shape = {}, .timeout_s = static_cast<double>(ns) / 1e9};
}

template <class Step>
auto Hierarchical::locally(const Call& call, Step&& step, std::int64_t margin_ns) {
  using Cause = CollectiveError::Cause;
  try {
    return step(*local_, until(call.deadline, margin_ns));
  } catch (const CollectiveError& error) {
    const tcp::Failure failure{error.cause() == Cause::timeout ? Cause::timeout : Cause::lost, error.ranks()};
    leave(failure);
    fail(call, failure);
  }
}

template <class Exchange>
void Hierarchical::between_nodes(const Call& call, Exchange&& exchange) {
  nodes_differ(call, [&](tcp::Mesh& mesh) {
    exchange(mesh);
    return false;
  });
}

template <class Exchange>
bool Hierarchical::nodes_differ(const Call& call, Exchange&& exchange) {
  Verdict verdict;
  if (mesh_) try {
      verdict.kind = exchange(*mesh_) ? Verdict::Kind::differ : Verdict::Kind::go_on;
    } catch (const tcp::ExchangeError& error) {
      verdict = {Verdict::Kind::failed, tcp::note_of(whole_nodes(error.failure()))};
    }
  share(call, &verdict, sizeof verdict);
  if (verdict.kind == Verdict::Kind::failed) fail(call, tcp::failure_of(verdict.failure));
  return verdict.kind == Verdict::Kind::differ;
}

}  // namespace accelmgr::collective
