// Sends objects from one member of a group to another, through a ring of 16 KiB for each ordered pair. An
// object is its length, then its bytes.
#pragma once

#include <string>
#include <string_view>

#include "collective/shm/group.hpp"

namespace accelmgr::collective::shm {

/// Blocks while the ring is full. Throws CollectiveError; SessionError when there is no memory for the ring.
void send(Group& group, std::string_view object, int to, Patience& patience);

/// Blocks until an object has arrived. An object that was sent completely is received even after its sender
/// has ended. If memory for an object is exhausted (std::bad_alloc), the next call receives it. Throws as
/// send() does.
std::string receive(Group& group, int from, Patience& patience);

}  // namespace accelmgr::collective::shm
