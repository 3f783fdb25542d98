// The context of this process: who it is, and the communicator of its world. One at a time, behind all free
// functions.
//
//   serial  --initialize(), or the environment has ranks-->  found  --first collective-->  joined
//     ^                                                        |                             |
//     +----------------- finalize(), or the environment has changed (sync) ------------------+
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "distributed/environment.hpp"
#include "distributed/join.hpp"

namespace accelmgr::distributed {

class Context {
 public:
  /// Serial.
  Context();
  /// That which the request describes; joined at the first collective. Throws ConfigError for a request that
  /// cannot be.
  explicit Context(JoinRequest request);

  bool is_serial() const noexcept { return !request_; }
  /// nullopt in serial.
  std::optional<std::string> backend() const;
  std::string model_name() const;
  double timeout_s() const noexcept;
  int rank() const noexcept { return place_.rank; }
  int world_size() const noexcept { return place_.world_size; }
  /// The rest of it may be unknown until the ranks have met. Throws UsageError then.
  const Place& whole_place() const;
  /// What it was found in; null in serial.
  const Environment* environment() const noexcept { return request_ ? &request_->environment : nullptr; }
  bool is_joined() const noexcept { return joined_.world != nullptr; }
  /// Another number for each context of this process: groups end with theirs.
  std::uint64_t number() const noexcept { return number_; }

  /// Joins at the first call, and blocks then until all ranks are there, or (one host of ours) until it has
  /// its place among them. Throws as initialize() does.
  const std::shared_ptr<Communicator>& world();
  /// One for each list of ranks, of which this process is one.
  std::shared_ptr<Communicator> group_of(const std::vector<int>& ranks);
  /// Whether all these ranks are on one host.
  bool share_host(const std::vector<int>& ranks);

  /// initialize() was called: it is not given up because the environment has changed.
  void keep() noexcept { kept_ = true; }
  bool is_kept() const noexcept { return kept_; }

 private:
  std::optional<JoinRequest> request_;
  Place place_;
  Joined joined_;
  std::map<std::vector<int>, std::shared_ptr<Communicator>> groups_;
  std::uint64_t number_;
  bool kept_ = false;
};

inline constexpr double default_timeout_s = 300;

/// What the environment, which has ranks, asks for.
JoinRequest request_of(Environment environment);

/// Looks for a context first, while there is none ("lazy sync").
Context& current();
/// The one there is, without looking for another.
Context& current_unchanged();
void replace_context(std::unique_ptr<Context> context);
/// What set_local_rank() said.
std::optional<int> local_rank_hint();

}  // namespace accelmgr::distributed
