// How the configuration of a run differs from that of the checkpoint that it goes on from.
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

/// Returns "optimizer.learning_rate 0.001 -> 0.002" for each option whose value differs and influences what
/// is computed: not for timeouts, paths or intervals of output; for `train.steps` only if the learning rate
/// depends on it.
std::vector<std::string> differences(const Config& before, const Config& after);

}  // namespace accelmgr::config
