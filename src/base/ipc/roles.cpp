#include "base/ipc/roles.hpp"

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace accelmgr::ipc {
namespace {

// Functions, because constants of other files register before main() begins.
std::map<std::string, Role, std::less<>>& roles() {
  static std::map<std::string, Role, std::less<>> all;
  return all;
}

std::map<std::string, ForkedRole, std::less<>>& forked_roles() {
  static std::map<std::string, ForkedRole, std::less<>> all;
  return all;
}

std::atomic<bool> role_taken{false};

}  // namespace

RegisteredRole::RegisteredRole(std::string_view argument, Role role) {
  roles().emplace(argument, std::move(role));
}

RegisteredForkedRole::RegisteredForkedRole(std::string_view name, ForkedRole role) {
  forked_roles().emplace(name, std::move(role));
}

const ForkedRole* find_forked_role(std::string_view name) noexcept {
  const auto found = forked_roles().find(name);
  return found == forked_roles().end() ? nullptr : &found->second;
}

void take_role(int argc, char** argv) {
  role_taken = true;
  const std::vector<std::string_view> arguments(argv, argv + argc);
  if (arguments.size() < 2) return;
  const auto role = roles().find(arguments[1]);
  if (role != roles().end()) role->second(std::span(arguments).subspan(2));
}

void let_be_executed() noexcept { role_taken = true; }

bool can_be_executed() noexcept { return role_taken; }

}  // namespace accelmgr::ipc
