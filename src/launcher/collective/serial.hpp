// The communicator of one rank: every collective is a copy.
#pragma once

#include <memory>

#include "accelmgr/communicator.hpp"

namespace accelmgr::collective {

/// `world_rank` is the rank in the world of its only member.
std::shared_ptr<Communicator> make_serial(int world_rank = 0);

}  // namespace accelmgr::collective
