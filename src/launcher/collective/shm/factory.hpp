// The only header of the shm backend that code outside of it includes: communicators of one node, over shared
// memory.
//
// A world is one memfd, created before its ranks join. Ranks are processes, threads, or both.
#pragma once

#include <memory>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::collective::shm {

/// How ranks wait for each other: they spin for a while if each has a core of its own, or sleep in the
/// kernel.
enum class Waiting {
  by_cores,  ///< Spin if there is a core for each rank: first judged by this process's cores, later by those
             ///< of all ranks.
  parked,    ///< Never spin: the cores have other work meanwhile.
};

/// Creates the memory of a world of `size` ranks, 1 to 1024. Throws SessionError when there is too little
/// memory.
base::UniqueFd create_world(int size, Waiting waiting = Waiting::by_cores);

struct JoinOptions {
  double timeout_s = 300;  ///< Of joining, and of every call whose options give none.
  /// The rank of each member in the world of all nodes, if this memory is that of one node among several.
  /// Empty: 0, 1, ...
  std::vector<int> world_ranks = {};
};

/// Makes the calling process or thread rank `rank` of the world in `fd`. The caller may close `fd`
/// afterwards. Does not wait for the other ranks. A member that needs no result may pass null as `out` of its
/// all_reduce(). Throws SessionError when `fd` is no world, the world is of another build, or the rank is
/// taken.
std::shared_ptr<Communicator> join_world(int fd, int rank, const JoinOptions& options = {});

/// Tells the other members that this one goes on no more: their current and later calls throw. Does nothing
/// if the communicator is not of the shm backend.
void give_up(Communicator& communicator) noexcept;

}  // namespace accelmgr::collective::shm
