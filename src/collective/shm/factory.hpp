// The only door to the shm backend: communicators of one host, over shared memory.
//
// A world is one memfd, made before its ranks are. Ranks are processes, threads, or both.
#pragma once

#include <memory>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::collective::shm {

/// How ranks wait for each other: spinning for a while, where each has a core of its own, or in the kernel.
enum class Waiting {
  by_cores,  ///< As the cores that this process may use suggest, and later those of the ranks.
  parked,    ///< For ranks whose cores have something else to do meanwhile.
};

/// The memory of a world of `size` ranks, 1 or more. Throws SessionError when there is too little.
base::UniqueFd create_world(int size, Waiting waiting = Waiting::by_cores);

struct JoinOptions {
  double timeout_s = 300;  ///< Of joining, and of every call that does not say otherwise.
  /// The rank in the world of each member, where this memory is that of one host among several; empty: 0, 1,
  /// ...
  std::vector<int> world_ranks = {};
};

/// Makes the calling process, or thread, rank `rank` of the world in `fd`, which may be closed afterwards.
/// Does not wait for the others. A member that needs no result may pass null as the `out` of its
/// all_reduce(). Throws SessionError when the memory is no world, or of another build, or the rank is taken.
std::shared_ptr<Communicator> join_world(int fd, int rank, const JoinOptions& options = {});

/// Ends what the other members of a communicator wait for, now and later: this member goes on no more. One
/// that is not of shared memory stays as it is.
void give_up(Communicator& communicator) noexcept;

}  // namespace accelmgr::collective::shm
