// The roles of this program: what it does when accelmgr executes it again, or when the zygote forks it. The
// file that implements a role registers it, so a program has the roles of the parts that it links.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// The main function of the program in that role. It does not return, unless the arguments are not those of
/// the role: the program then goes on as if it had no role.
using Role = std::function<void(std::span<const std::string_view> arguments)>;

/// Registers a role before main() begins, as a constant of a source file.
struct RegisteredRole {
  /// `argument` is the first argument of the executed program; the role gets those that follow.
  RegisteredRole(std::string_view argument, Role role);
};

/// The main function of a process that the zygote has forked. `socket` is its end of a socket pair, `creator`
/// the pidfd of the process that asked for it. It does not return.
using ForkedRole = std::function<void(base::UniqueFd socket, base::UniqueFd creator)>;

/// Registers a role that the zygote forks, before main() begins.
struct RegisteredForkedRole {
  RegisteredForkedRole(std::string_view name, ForkedRole role);
};
/// nullptr if there is none of that name.
const ForkedRole* find_forked_role(std::string_view name) noexcept;

/// Call it first in main(). If this program was executed in a role, it takes that role and does not return.
void take_role(int argc, char** argv);
/// Declares that this program calls take_role() when it is executed with ipc::self_command().
void let_be_executed() noexcept;
/// True if take_role() or let_be_executed() was called: only then can this program be executed in a role.
bool can_be_executed() noexcept;

}  // namespace accelmgr::ipc
