#include "launcher/collective/signature/argument_checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace accelmgr::collective {

std::string names_of(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

void check_member(int rank, int size, const char* what) {
  if (rank < 0 || rank >= size)
    throw UsageError(
        fmt::format("{} {} is not within 0 to {}, the ranks of this communicator", what, rank, size - 1));
}

void check_group(std::span<const int> ranks, int self, int size) {
  const auto list = fmt::format("[{}]", fmt::join(ranks, ", "));
  if (std::ranges::adjacent_find(ranks, std::greater_equal<>{}) != ranks.end())
    throw UsageError(fmt::format("the ranks of a group must be in ascending order, each once, not {}", list));
  for (const int rank : ranks) check_member(rank, size, "member");
  if (std::ranges::find(ranks, self) == ranks.end())
    throw UsageError(
        fmt::format("rank {} cannot make a group of ranks {}, because it is not one of them", self, list));
}

UsageError of_another_process(std::string_view call) {
  return UsageError(fmt::format("{}: this communicator belongs to the process that forked this one", call));
}

CollectiveError missing_ranks(CollectiveError::Cause cause, std::string_view call, std::vector<int> ranks,
                              double timeout_s) {
  using Cause = CollectiveError::Cause;
  const auto who = names_of(ranks);
  const char* have = ranks.size() == 1 ? "has" : "have";
  switch (cause) {
    case Cause::timeout:
      return {fmt::format("{}: {} did not arrive within {:g} s", call, who, timeout_s), cause,
              std::move(ranks)};
    case Cause::lost:
      return {fmt::format("{}: {} {} died or cannot be reached", call, who, have), cause, std::move(ranks)};
    default:
      return {fmt::format("{}: {} did not complete an earlier call; make a new communicator with group()",
                          call, who),
              cause, std::move(ranks)};
  }
}

}  // namespace accelmgr::collective
