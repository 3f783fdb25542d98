#include "nodes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "ipc/wait_ready.hpp"

namespace accelmgr::program {
namespace {

constexpr double read_s = 5;  // For keys that are known to be set.
constexpr double leave_again_s = 0.02;

std::string written(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string text_of(const Node& node) {
  return written({{"nnodes", node.nnodes},
                  {"nprocs", node.nprocs},
                  {"max_restarts", node.max_restarts},
                  {"backend", node.backend},
                  {"host", node.host},
                  {"pid", node.pid}});
}

Node node_from(const nlohmann::json& value) {
  return {.nnodes = value.at("nnodes"),
          .nprocs = value.at("nprocs"),
          .max_restarts = value.at("max_restarts"),
          .backend = value.at("backend"),
          .host = value.at("host"),
          .pid = value.at("pid")};
}

std::string name_of(int node_rank, const Node& node) {
  return fmt::format("node {} (host {}, pid {})", node_rank, node.host, node.pid);
}

/// How two agents contradict each other; empty if they do not.
std::string difference(int a_rank, const Node& a, int b_rank, const Node& b) {
  const auto differ = [&](const char* option, const auto& ours, const auto& theirs) {
    return fmt::format("the hosts contradict each other: {} was started with {} {}, {} with {} {}",
                       name_of(a_rank, a), option, ours, name_of(b_rank, b), option, theirs);
  };
  if (a.nnodes != b.nnodes) return differ("--nnodes", a.nnodes, b.nnodes);
  if (a.max_restarts != b.max_restarts) return differ("--max-restarts", a.max_restarts, b.max_restarts);
  if (a.backend != b.backend) return differ("backend", a.backend, b.backend);
  return "";
}

std::string new_run_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace

int World::size() const { return rank_offset(static_cast<int>(nodes.size())); }

int World::rank_offset(int node_rank) const {
  int offset = 0;
  for (int node = 0; node < node_rank; ++node) offset += nodes.at(static_cast<std::size_t>(node)).nprocs;
  return offset;
}

Nodes::Nodes(collective::Store& store, int node_rank, Node self, std::int64_t (*now_ns)())
    : store_(store), node_rank_(node_rank), self_(std::move(self)), now_ns_(now_ns) {}

std::string Nodes::key(const std::string& name, int number) const {
  return key(fmt::format("{}/{}", name, number));
}

std::string Nodes::of_attempt(const std::string& name) const {
  return fmt::format("attempt/{}/{}", attempt_, name);
}

std::string Nodes::read(const std::string& name) {
  return store_.get(key(name), base::Deadline::in_seconds(read_s));
}

// ---- Meeting ----

std::optional<World> Nodes::meet() {
  if (!claimed_) claim_place();
  check_contradictions();
  if (node_rank_ == 0 && !store_.has(key("world")))
    if (auto world = collect()) {
      nlohmann::json nodes = nlohmann::json::array();
      for (const auto& node : world->nodes) nodes.push_back(nlohmann::json::parse(text_of(node)));
      store_.set(key("world"), written({{"nodes", nodes}, {"run_id", world->run_id}}));
    }
  if (!store_.has(key("world"))) return std::nullopt;
  const auto value = nlohmann::json::parse(read("world"));
  World world{{}, value.at("run_id")};
  for (const auto& node : value.at("nodes")) world.nodes.push_back(node_from(node));
  node_count_ = static_cast<int>(world.nodes.size());
  return world;
}

void Nodes::claim_place() {
  const auto place = fmt::format("node/{}", node_rank_);
  if (store_.add(key("claims/" + place), 1) > 1) {
    const auto other = node_from(nlohmann::json::parse(read(place)));
    throw ConfigError(fmt::format("--node-rank {} is already taken by host {} (agent of pid {})", node_rank_,
                                  other.host, other.pid),
                      "launch.node_rank");
  }
  store_.set(key(place), text_of(self_));
  claimed_ = true;
}

/// Each agent compares itself with node 0, because node 0 does not read nodes beyond its own --nnodes.
void Nodes::check_contradictions() {
  if (store_.has(key("contradiction"))) throw ConfigError(read("contradiction"), "launch.nnodes");
  if (store_.has(key("missing"))) throw SessionError(read("missing"));
  if (node_rank_ == 0 || known_.contains(0) || !store_.has(key("node", 0))) return;
  known_[0] = node_from(nlohmann::json::parse(read("node/0")));
  const auto what = difference(0, known_[0], node_rank_, self_);
  if (!what.empty()) contradict(what);
}

void Nodes::contradict(const std::string& what) {
  store_.set(key("contradiction"), what);
  throw ConfigError(what, "launch.nnodes");
}

std::optional<World> Nodes::collect() {
  known_[0] = self_;
  for (int node = 1; node < self_.nnodes; ++node) {
    if (known_.contains(node) || !store_.has(key("node", node))) continue;
    known_[node] = node_from(nlohmann::json::parse(read(fmt::format("node/{}", node))));
    const auto what = difference(0, self_, node, known_[node]);
    if (!what.empty()) contradict(what);
  }
  if (static_cast<int>(known_.size()) < self_.nnodes) return std::nullopt;
  World world{{}, new_run_id()};
  for (const auto& [rank, node] : known_) world.nodes.push_back(node);
  return world;
}

SessionError Nodes::missing(const std::string& address, double waited_s) {
  std::vector<std::string> came, did_not;
  for (int node = 0; node < self_.nnodes; ++node) {
    if (node == node_rank_)
      came.push_back(name_of(node, self_));
    else if (store_.has(key("node", node)))
      came.push_back(name_of(node, node_from(nlohmann::json::parse(read(fmt::format("node/{}", node))))));
    else
      did_not.push_back(fmt::format("node {}", node));
  }
  const auto what =
      fmt::format("not all hosts joined {} within {:.3g} s (--rendezvous-timeout): {} missing; joined: {}",
                  address, waited_s, fmt::join(did_not, ", "), fmt::join(came, ", "));
  if (node_rank_ == 0) store_.set(key("missing"), what);
  return SessionError(what);
}

// ---- An attempt ----

Nodes::Outcome Nodes::look() {
  store_.add(key("beat", node_rank_), 1);
  if (auto why = stopped()) return {Outcome::Kind::stopped, std::move(*why)};
  if (const auto first = of_attempt("first"); store_.has(key(first)))
    return {Outcome::Kind::failed, failure_from(nlohmann::json::parse(read(first)))};
  if (store_.has(key(of_attempt("all_done")))) return {.kind = Outcome::Kind::done};
  watch_the_others();
  if (node_rank_ == 0 && all_have(of_attempt("done"))) {
    store_.set(key(of_attempt("all_done")), "1");
    return {.kind = Outcome::Kind::done};
  }
  return {};
}

std::optional<RankFailure> Nodes::stopped() {
  if (!store_.has(key("stop"))) return std::nullopt;
  return failure_from(nlohmann::json::parse(read("stop")));
}

/// Node 0 watches the other agents. They notice the loss of node 0 by its store.
void Nodes::watch_the_others() {
  const auto now = now_ns_();
  // If this agent has not looked for a long time, it was stopped itself. Then old heartbeats prove nothing.
  const bool was_away = looked_ns_ != 0 && now - looked_ns_ > static_cast<std::int64_t>(lost_after_s * 0.5e9);
  looked_ns_ = now;
  for (int node = 1; node_rank_ == 0 && node < node_count_; ++node) {
    auto& beat = beats_[node];
    const auto count = store_.add(key("beat", node), 0);
    if (count != beat.count || was_away) beat = {count, now};
    if (static_cast<double>(now - beat.changed_ns) < lost_after_s * 1e9) continue;
    stop({.node_rank = node,
          .host = known_[node].host,
          .pid = known_[node].pid,
          .what = fmt::format("no heartbeat of {} for {} s", name_of(node, known_[node]), lost_after_s)});
  }
}

bool Nodes::all_have(const std::string& name) {
  for (int node = 0; node < node_count_; ++node)
    if (!store_.has(key(name, node))) return false;
  return true;
}

void Nodes::report_failed(const RankFailure& failure) {
  if (store_.add(key(of_attempt("failures")), 1) == 1)
    store_.set(key(of_attempt("first")), written(to_json(failure)));
}

void Nodes::report_done() { store_.set(key(of_attempt("done"), node_rank_), "1"); }

void Nodes::stop(const RankFailure& why) {
  if (store_.add(key("stops"), 1) == 1) store_.set(key("stop"), written(to_json(why)));
}

void Nodes::report_ended(const EndedNode& ended) {
  nlohmann::json later = nlohmann::json::array();
  for (const auto& failure : ended.later) later.push_back(to_json(failure));
  store_.set(key(of_attempt("ended"), node_rank_), written({{"ended", ended.ended}, {"later", later}}));
}

std::optional<EndedNode> Nodes::all_ended() {
  store_.add(key("beat", node_rank_), 1);
  EndedNode all;
  if (!all_have(of_attempt("ended"))) return std::nullopt;
  for (int node = 0; node < node_count_; ++node) {
    const auto value = nlohmann::json::parse(read(fmt::format("{}/{}", of_attempt("ended"), node)));
    all.ended += value.at("ended").get<int>();
    for (const auto& failure : value.at("later")) all.later.push_back(failure_from(failure));
  }
  std::ranges::stable_sort(all.later, {}, &RankFailure::time_s);
  return all;
}

// ---- The next attempt, and the end ----

void Nodes::announce(int attempt) { store_.set(key("begun", attempt), "1"); }

bool Nodes::follow(int attempt) {
  store_.add(key("beat", node_rank_), 1);
  if (!store_.has(key("begun", attempt))) return false;
  attempt_ = attempt;
  beats_.clear();
  return true;
}

void Nodes::leave(base::Deadline deadline) noexcept {
  if (!claimed_) return;  // This node rank belongs to another agent.
  try {
    store_.set(key("left", node_rank_), "1");
    if (node_rank_ != 0) {
      store_.has(key("left", node_rank_));  // The answer proves that set() has arrived.
      return;
    }
    // Waits only for agents that came: without all of them there was no world.
    const auto gone = [this] {
      for (int node = 1; node < self_.nnodes; ++node)
        if (store_.has(key("node", node)) && !store_.has(key("left", node))) return false;
      return true;
    };
    while (!gone() && !deadline.passed()) ipc::wait_ready(-1, 0, base::Deadline::in_seconds(leave_again_s));
  } catch (const std::exception&) {
    // The store is gone, and the other agents with it.
  }
}

}  // namespace accelmgr::program
