// The steps that make up a call of Hierarchical, for the files that implement it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/clock.hpp"
#include "base/timing.hpp"
#include "collective/hierarchical.hpp"

namespace accelmgr::collective {

inline std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

inline CallOptions until(base::Deadline deadline, std::int64_t margin_ns) {
  const auto ns = std::max<std::int64_t>(deadline.remaining_ns() + margin_ns, 1'000'000);
  return {.shape = {}, .timeout_s = static_cast<double>(ns) / 1e9};
}

template <class Step>
auto Hierarchical::locally(const Call& call, std::int64_t margin_ns, Step&& step) {
  using Cause = CollectiveError::Cause;
  try {
    return step(*local_, until(call.deadline, margin_ns));
  } catch (const CollectiveError& error) {
    const gloo::Failure failure{error.cause() == Cause::timeout ? Cause::timeout : Cause::lost,
                                error.ranks()};
    leave(failure);
    fail(call, failure);
  }
}

template <class Step>
auto Hierarchical::locally(const Call& call, Step&& step) {
  return locally(call, timing::leader_margin_ns, std::forward<Step>(step));
}

template <class Exchange>
void Hierarchical::between_hosts(const Call& call, Exchange&& exchange) {
  share_verdict(call, verdict_of([&](gloo::Mesh& mesh) {
                  exchange(mesh);
                  return Verdict::Kind::go_on;
                }));
}

template <class Exchange>
bool Hierarchical::hosts_differ(const Call& call, Exchange&& exchange) {
  const auto kind = share_verdict(call, verdict_of([&](gloo::Mesh& mesh) {
                                    return exchange(mesh) ? Verdict::Kind::differ : Verdict::Kind::go_on;
                                  }));
  return kind == Verdict::Kind::differ;
}

template <class Exchange>
Hierarchical::Verdict Hierarchical::verdict_of(Exchange&& exchange) {
  if (!mesh_) return {};
  try {
    return {.kind = exchange(*mesh_)};
  } catch (const gloo::ExchangeError& error) {
    return {Verdict::Kind::failed, gloo::note_of(whole_hosts(error.failure()))};
  }
}

}  // namespace accelmgr::collective
