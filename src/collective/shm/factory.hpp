// The only door to the shm backend: communicators of one host, over shared memory.
//
// A world is one memfd, made before its ranks are. Ranks are processes, threads, or both.
#pragma once

#include <memory>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::collective::shm {

/// The memory of a world of `size` ranks, 1 or more. Throws SessionError when there is too little.
base::UniqueFd create_world(int size);

struct JoinOptions {
  double timeout_s = 300;  ///< Of joining, and of every call that does not say otherwise.
  /// The rank in the world of each member, where this memory is that of one host among several; empty: 0, 1,
  /// ...
  std::vector<int> world_ranks = {};
};

/// Makes the calling process, or thread, rank `rank` of the world in `fd`, which may be closed afterwards.
/// Does not wait for the others. Throws SessionError when the memory is no world, or of another build, or the
/// rank is taken.
std::shared_ptr<Communicator> join_world(int fd, int rank, const JoinOptions& options = {});

}  // namespace accelmgr::collective::shm
