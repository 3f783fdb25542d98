// The manager process: it owns the session, loads the data, and supervises the runners.
#pragma once

#include "base/unique_fd.hpp"

namespace accelmgr::manager {

/// Where the models and the data of a manager are.
enum class Image {
  executed,  ///< In the program: a fork server that is lost is executed anew.
  forked,    ///< In this fork of the host alone: the host must fork another manager.
};

/// Runs the manager process, from its beginning to its end. Call before it starts threads. `socket` leads to
/// the host. If `host_pidfd` is empty, the pidfd is obtained from the socket.
[[noreturn]] void run(base::UniqueFd socket, base::UniqueFd host_pidfd = {}, Image image = Image::executed);

}  // namespace accelmgr::manager
