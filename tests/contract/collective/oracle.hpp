// What a reduction must give, computed by one process in the plainest way.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"

namespace accelmgr::collective::contract {

using Bytes = std::vector<std::byte>;

/// inputs[0] op inputs[1] op ..., element by element. Integers wrap around.
Bytes reduce(std::span<const Bytes> inputs, DType dtype, ReduceOp op);

/// Empty when the elements are the same bits, or, with a tolerance, numbers within it: |a - b| <= tolerance x
/// (|a| + 16), 16 being above the sums of what Call gives as input. Else what differs first.
std::string difference(std::span<const std::byte> expected, std::span<const std::byte> found, DType dtype,
                       double tolerance = 0);

}  // namespace accelmgr::collective::contract
