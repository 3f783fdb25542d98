#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstring>
#include <optional>

#include "launch/child.hpp"
#include "launch/forkserver.hpp"
#include "launch/spawner.hpp"

namespace accelmgr::launch {
namespace {

std::atomic<bool> role_taken{false};

std::optional<int> number_in(const char* text) noexcept {
  int number = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, number);
  return error == std::errc{} && stop == end ? std::optional(number) : std::nullopt;
}

}  // namespace

void take_role(int argc, char** argv) {
  role_taken = true;
  if (argc == 2 && std::strcmp(argv[1], forkserver_argument) == 0) run_forkserver();
  if (argc != 4 || std::strcmp(argv[1], child_argument) != 0) return;
  const auto socket = number_in(argv[2]), rank = number_in(argv[3]);
  if (socket && rank) run_executed_child(*socket, *rank);
}

void let_be_executed() noexcept { role_taken = true; }

bool can_be_executed() noexcept { return role_taken; }

}  // namespace accelmgr::launch
