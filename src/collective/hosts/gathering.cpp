#include "collective/hosts/gathering.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "base/interruption.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "collective/signature/checks.hpp"

namespace accelmgr::collective {
namespace {

using Cause = CollectiveError::Cause;

constexpr const char* given_up = "given up";

/// CAUSE COUNT RANK... TEXT
std::string written(const CollectiveError& error) {
  return fmt::format("{} {} {} {}", static_cast<int>(error.cause()), error.ranks().size(),
                     fmt::join(error.ranks(), " "), error.what());
}

CollectiveError read(const std::string& text) {
  std::istringstream words(text);
  int cause = 0;
  std::size_t count = 0;
  words >> cause >> count;
  std::vector<int> ranks(count);
  for (auto& rank : ranks) words >> rank;
  std::string what;
  std::getline(words >> std::ws, what);
  return {what, static_cast<Cause>(cause), std::move(ranks)};
}

}  // namespace

Gathering::Gathering(SharedStore& store, std::string name, double timeout_s, base::Deadline deadline,
                     std::function<std::vector<int>()> dead)
    : store_(store),
      name_(std::move(name)),
      timeout_s_(timeout_s),
      deadline_(deadline),
      dead_(std::move(dead)) {}

void Gathering::look() {
  const auto key = name_ + '/' + given_up;
  if (store_.has(key)) throw read(store_.get(key, deadline_));
  if (!dead_) return;
  auto dead = dead_();
  if (dead.empty()) return;
  const auto text = fmt::format("{} died before all ranks had joined '{}'", names_of(dead), name_);
  throw CollectiveError(text, Cause::lost, std::move(dead));
}

std::optional<std::string> Gathering::wait_for(const std::string& key, std::string& why_not) {
  for (;;) {
    look();
    const auto until =
        base::earlier(deadline_, base::Deadline::at_ns(base::now_ns() + timing::store_look_ns));
    try {
      return store_.get(name_ + '/' + key, until);
    } catch (const CollectiveError& late) {
      why_not = late.what();
      if (deadline_.passed() || base::interrupted()) return std::nullopt;
    }
  }
}

std::string Gathering::get(const std::string& key) {
  std::string why_not;
  if (auto value = wait_for(key, why_not)) return *std::move(value);
  throw CollectiveError(why_not, Cause::timeout, {});
}

std::vector<std::string> Gathering::exchange(int rank, const std::vector<int>& ranks,
                                             const std::string& value) {
  const auto key_of = [](std::size_t i) { return fmt::format("came/{}", i); };
  set(key_of(static_cast<std::size_t>(rank)), value);
  std::vector<std::string> values(ranks.size());
  std::string why_not;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (auto came = wait_for(key_of(i), why_not)) {
      values[i] = *std::move(came);
      continue;
    }
    std::vector<int> missing{ranks[i]};
    for (std::size_t other = i + 1; other < ranks.size(); ++other)
      if (!store_.has(name_ + '/' + key_of(other))) missing.push_back(ranks[other]);
    const auto text = fmt::format("{} did not join the rendezvous '{}' within {:g} s ({})", names_of(missing),
                                  name_, timeout_s_, why_not);
    throw CollectiveError(text, Cause::timeout, std::move(missing));
  }
  return values;
}

void Gathering::give_up(const CollectiveError& why) noexcept {
  try {
    const auto key = name_ + '/' + given_up;
    if (!store_.has(key)) store_.set(key, written(why));
  } catch (const std::exception& error) {
    base::log().debug("the other ranks were not told that '{}' was given up: {}", name_, error.what());
  }
}

}  // namespace accelmgr::collective
