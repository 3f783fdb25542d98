// Which gradients a device copies together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/session/shards.hpp"

namespace accelmgr::device {

using session::bucket_bytes;
using session::first_bucket_bytes;

/// Cuts `order`, parameters in the order in which their gradients become ready, into buckets. A bucket ends
/// with the gradient that fills it. `bytes` is indexed by parameter.
std::vector<std::vector<std::size_t>> plan_buckets(std::span<const std::size_t> order,
                                                   std::span<const std::uint64_t> bytes);

}  // namespace accelmgr::device
