// What a run is told when its configuration is not that of the checkpoint it goes on from.
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

/// "optimizer.learning_rate 0.001 -> 0.002", one for each option of another value that has a say in what is
/// computed: not timeouts, places, or how often something is shown. `train.steps` is one where the learning
/// rate follows it.
std::vector<std::string> differences(const Config& before, const Config& after);

}  // namespace accelmgr::config
