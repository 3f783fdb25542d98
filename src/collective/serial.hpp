// One rank: every collective is a copy.
#pragma once

#include <memory>

#include "accelmgr/communicator.hpp"

namespace accelmgr::collective {

std::shared_ptr<Communicator> make_serial();

}  // namespace accelmgr::collective
