// The state of an optimizer over flat groups, as checkpoints have it.
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/named_tensor.hpp"
#include "accelmgr/optimizer.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::libtorch {

/// `total_updates`: the update at which a cosine ends.
session::RateSchedule schedule_of(const OptimizerConfig& config, std::int64_t total_updates);

/// Throws ConfigError.
void check_config(const OptimizerConfig& config);

/// The names of the groups in a state: `decay`, `no_decay`, `decay.2`. Empty for frozen groups.
std::vector<std::string> names_in_state(const std::vector<FlatGroup>& groups);

/// Copies `given` over the tensors of `own`, whose last one is `optimizer/updates`. Throws ModelError, which
/// names a tensor that is missing, unknown, given twice or of the wrong shape or dtype; nothing has changed
/// then.
void load_state(const std::vector<NamedTensor>& own, const std::vector<NamedTensor>& given);

}  // namespace accelmgr::libtorch
