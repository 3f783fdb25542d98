// What a reduction must give, computed by one process.
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

/// Says how many elements differ, and which is the first; empty if none does. Without a tolerance, elements
/// are equal if their bits are; with one, if |a - b| <= tolerance x (|a| + 16). The inputs of a Call have
/// sums below 16.
std::string difference(std::span<const std::byte> expected, std::span<const std::byte> found, DType dtype,
                       double tolerance = 0);

}  // namespace accelmgr::collective::contract
