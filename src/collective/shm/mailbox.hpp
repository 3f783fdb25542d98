// Objects from one member of a group to another, through a ring of a few kilobytes for each ordered pair. An
// object is its length, then its bytes.
#pragma once

#include <string>
#include <string_view>

#include "collective/shm/group.hpp"

namespace accelmgr::collective::shm {

/// Blocks while the ring is full. Throws CollectiveError; SessionError when there is no memory for the ring.
void send(Group& group, std::string_view object, int to, Patience& patience);

/// What a member has sent completely is received also after its end; one for which there was no memory
/// (std::bad_alloc), by the next call.
std::string receive(Group& group, int from, Patience& patience);

}  // namespace accelmgr::collective::shm
