#include "launcher/collective/rendezvous/rendezvous.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/checked_fields.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "launcher/collective/signature/argument_checks.hpp"

namespace accelmgr::collective {
namespace {

using Cause = CollectiveError::Cause;

constexpr const char* given_up = "given up";

std::string written(const CollectiveError& error) {
  return base::json_text({{"what", error.what()}, {"cause", error.cause()}, {"ranks", error.ranks()}});
}

CollectiveError read(const std::string& text) {
  const auto fields = nlohmann::json::parse(text);
  return {fields.at("what").get<std::string>(), fields.at("cause").get<Cause>(),
          fields.at("ranks").get<std::vector<int>>()};
}

}  // namespace

Rendezvous::Rendezvous(SharedStore& store, std::string name, double timeout_s, base::Deadline deadline,
                       std::function<std::vector<int>()> dead)
    : store_(store),
      name_(std::move(name)),
      timeout_s_(timeout_s),
      deadline_(deadline),
      dead_(std::move(dead)) {}

void Rendezvous::look() {
  const auto key = name_ + '/' + given_up;
  if (store_.has(key)) throw read(store_.get(key, deadline_));
  if (!dead_) return;
  auto dead = dead_();
  if (dead.empty()) return;
  const auto text = fmt::format("{} died before all ranks had joined '{}'", names_of(dead), name_);
  throw CollectiveError(text, Cause::lost, std::move(dead));
}

std::optional<std::string> Rendezvous::wait_for(const std::string& key, std::string& why_not) {
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

std::vector<std::string> Rendezvous::exchange(int rank, const std::vector<int>& ranks,
                                              const std::string& value) {
  const auto key_of = [](std::size_t i) { return fmt::format("came/{}", i); };
  store_.set(name_ + '/' + key_of(static_cast<std::size_t>(rank)), value);
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

void Rendezvous::give_up(const CollectiveError& why) noexcept {
  try {
    const auto key = name_ + '/' + given_up;
    if (!store_.has(key)) store_.set(key, written(why));
  } catch (const std::exception& error) {
    base::log().debug("the other ranks were not told that '{}' was given up: {}", name_, error.what());
  }
}

}  // namespace accelmgr::collective
