// Gives a network of float32 parameters any dtypes: what it computes in float32 is rounded to them.
#pragma once

#include <memory>
#include <vector>

#include "engine/support/network.hpp"

namespace accelmgr::test {

/// The parameters have `dtypes` in turn. A complex parameter has half as many numbers in its last dimension,
/// which must be even: the real part is one number of the network's, the imaginary part the next one.
std::unique_ptr<Network> with_dtypes(std::unique_ptr<Network> network, const std::vector<DType>& dtypes);

}  // namespace accelmgr::test
