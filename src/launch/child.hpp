// What a launched process does, from its fork on.
#pragma once

#include <functional>

#include "ipc/launcher.hpp"
#include "launch/spawner.hpp"

namespace accelmgr::launch {

/// The argument of this program executed as a child; the descriptor of its socket and its rank follow.
inline constexpr const char* child_argument = "--accelmgr-child";

/// In a child just forked by the launcher: reads its order, becomes what that says. Does not return.
[[noreturn]] void run_child(ipc::SpawnRequest request, const std::function<Value(int)>& callable,
                            const std::function<void(int)>& setup) noexcept;

/// In this program executed as a child, with what follows child_argument.
[[noreturn]] void run_executed_child(int socket, int rank) noexcept;

}  // namespace accelmgr::launch
