// The steps of which a call of two levels is made, for the files that implement it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/clock.hpp"
#include "collective/two_level.hpp"

namespace accelmgr::collective {

/// How much longer the others wait for their leader, who may be telling other hosts (Mesh::abandon()).
inline constexpr std::int64_t leader_margin_ns = 2'000'000'000;

inline std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

inline CallOptions until(base::Deadline deadline, std::int64_t margin_ns) {
  const auto ns = std::max<std::int64_t>(deadline.remaining_ns() + margin_ns, 1'000'000);
  return {.shape = {}, .timeout_s = static_cast<double>(ns) / 1e9};
}

template <class Step>
auto TwoLevel::locally(const Call& call, std::int64_t margin_ns, Step&& step) {
  using Cause = CollectiveError::Cause;
  try {
    return step(*local_, until(call.deadline, margin_ns));
  } catch (const CollectiveError& error) {
    // A local communicator that an earlier send() broke is as good as lost.
    const gloo::Failure failure{error.cause() == Cause::timeout ? Cause::timeout : Cause::lost,
                                error.ranks()};
    leave(failure);
    fail(call, failure);
  }
}

template <class Step>
auto TwoLevel::locally(const Call& call, Step&& step) {
  return locally(call, leader_margin_ns, std::forward<Step>(step));
}

template <class Step>
bool TwoLevel::between_hosts(const Call& call, Step&& step) {
  Verdict verdict{};
  if (mesh_) {
    try {
      if constexpr (std::is_same_v<decltype(step(*mesh_)), bool>) {
        if (step(*mesh_)) verdict.kind = Verdict::Kind::differ;
      } else {
        step(*mesh_);
      }
    } catch (const gloo::ExchangeError& error) {
      verdict = verdict_of(whole_hosts(error.failure()));
    }
  }
  share(call, &verdict, sizeof verdict);
  if (verdict.kind == Verdict::Kind::failed)
    fail(call, {verdict.cause, {verdict.ranks.begin(), verdict.ranks.begin() + verdict.count}});
  return verdict.kind == Verdict::Kind::differ;
}

}  // namespace accelmgr::collective
