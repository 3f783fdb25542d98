#include "launcher/agent/nodes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/ipc/wait_ready.hpp"
#include "launcher/agent/report_file.hpp"

namespace accelmgr::agent {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Node, nnodes, min_nodes, node_rank, nprocs, max_restarts, backend,
                                   hostname, pid)

namespace {

constexpr double read_s = 5;  // For keys that are known to be set.
constexpr double leave_again_s = 0.02;

Node node_from(const std::string& text) { return nlohmann::json::parse(text); }

std::string name_of(int node_rank, const Node& node) {
  return fmt::format("node {} ({}, pid {})", node_rank, node.hostname, node.pid);
}

std::string range(const Node& node) {
  return node.is_elastic() ? fmt::format("{}:{}", node.min_nodes, node.nnodes) : std::to_string(node.nnodes);
}

/// How two agents contradict each other; empty if they do not.
std::string difference(int a_rank, const Node& a, int b_rank, const Node& b) {
  const auto differ = [&](const char* option, const auto& ours, const auto& theirs) {
    return fmt::format("the nodes contradict each other: {} was started with {} {}, {} with {} {}",
                       name_of(a_rank, a), option, ours, name_of(b_rank, b), option, theirs);
  };
  if (range(a) != range(b)) return differ("--nnodes", range(a), range(b));
  if (a.max_restarts != b.max_restarts) return differ("--max-restarts", a.max_restarts, b.max_restarts);
  if (a.backend != b.backend) return differ("backend", a.backend, b.backend);
  return "";
}

Failure failure_at(int node_rank, const Node& node, std::string what) {
  Failure failure{.time_s = seconds_since_1970(), .pid = node.pid, .what = std::move(what)};
  failure.node_rank = node_rank;
  failure.hostname = node.hostname;
  return failure;
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

Nodes::Nodes(collective::Store& store, Node self, std::int64_t (*now_ns)())
    : store_(store), self_(std::move(self)), now_ns_(now_ns), agent_(self_.node_rank) {
  world_.run_id = new_run_id();  // Node 0 tells its own one to the others.
}

std::string Nodes::key(const std::string& name, int number) const {
  return key(fmt::format("{}/{}", name, number));
}

std::string Nodes::of_attempt(const std::string& name) const {
  return fmt::format("attempt/{}/{}", world_.attempt, name);
}

std::string Nodes::read(const std::string& name) {
  return store_.get(key(name), base::Deadline::in_seconds(read_s));
}

/// Where an agent describes itself. Numbers of an elastic world are not node ranks.
std::string Nodes::place_of(int agent) const {
  return fmt::format("{}/{}", self_.is_elastic() && agent > 0 ? "agent" : "node", agent);
}

// ---- Meeting ----

std::optional<World> Nodes::meet(bool longer) {
  if (!claimed_) claim_place();
  check_contradictions();
  beat();
  if (agent_ == 0)
    if (const auto world = collect(0, longer)) announce(*world);
  if (!store_.has(key("latest"))) return std::nullopt;
  const auto attempt = std::stoi(read("latest"));
  auto world = follow(attempt);
  if (!world && store_.has(key(fmt::format("attempt/{}/all_done", attempt))))
    throw SessionError("the launch ended before this node could join it");
  return world;
}

void Nodes::claim_place() {
  if (self_.is_elastic() && agent_ > 0)
    agent_ = static_cast<int>(store_.add(key("agents"), 1));
  else if (store_.add(key("claims/" + place_of(agent_)), 1) > 1) {
    const auto other = node_from(read(place_of(agent_)));
    throw ConfigError(fmt::format("--node-rank {} is already taken on {} (by the agent of pid {})",
                                  self_.node_rank, other.hostname, other.pid),
                      "launch.node_rank");
  }
  store_.set(key(place_of(agent_)), base::json_text(self_));
  claimed_ = true;
}

/// Each agent compares itself with node 0, because node 0 does not read nodes beyond its own --nnodes.
void Nodes::check_contradictions() {
  if (store_.has(key("contradiction"))) throw ConfigError(read("contradiction"), "launch.nnodes");
  if (store_.has(key("missing"))) throw SessionError(read("missing"));
  if (const auto why = stopped()) throw SessionError("the launch was stopped: " + why->what);
  if (agent_ == 0 || known_.contains(0) || !store_.has(key("node", 0))) return;
  known_[0] = node_from(read("node/0"));
  const auto what = difference(0, known_[0], self_.node_rank, self_);
  if (!what.empty()) contradict(what);
}

void Nodes::contradict(const std::string& what) {
  // An elastic world goes on without the agent that contradicts it.
  if (!known_[0].is_elastic()) store_.set(key("contradiction"), what);
  throw ConfigError(what, "launch.nnodes");
}

bool Nodes::is_candidate(int agent) {
  if (agent == agent_) return true;
  const auto place = place_of(agent);
  if (!known_.contains(agent)) {
    if (!store_.has(key(place))) return false;
    known_[agent] = node_from(read(place));
  }
  const auto what = difference(0, self_, known_[agent].node_rank, known_[agent]);
  if (!self_.is_elastic()) {
    if (!what.empty()) contradict(what);
    return true;
  }
  if (!what.empty() || store_.has(key("left", agent)) || is_lost(agent)) return false;
  if (has_heartbeat(agent)) return true;
  store_.set(key("lost", agent), "1");
  return false;
}

std::optional<World> Nodes::collect(int attempt, bool longer) {
  known_[0] = self_;
  const auto numbers = self_.is_elastic() ? store_.add(key("agents"), 0) + 1 : self_.nnodes;
  World world{.attempt = attempt, .run_id = world_.run_id};
  for (int agent = 0; agent < numbers; ++agent)
    if (is_candidate(agent)) world.agents.push_back(agent);
  const auto size = static_cast<int>(world.agents.size());
  if (size < (longer ? self_.nnodes : self_.min_nodes)) return std::nullopt;
  // Nodes of the present world come first; one that has come too late waits for a place.
  std::stable_partition(world.agents.begin(), world.agents.end(), [this](int agent) {
    return std::ranges::find(world_.agents, agent) != world_.agents.end();
  });
  world.agents.resize(static_cast<std::size_t>(std::min(size, self_.nnodes)));
  std::ranges::stable_sort(world.agents, {}, [this](int agent) { return known_[agent].node_rank; });
  for (const int agent : world.agents) world.nodes.push_back(known_[agent]);
  return world;
}

void Nodes::announce(const World& world) {
  store_.set(key("world", world.attempt),
             base::json_text({{"nodes", world.nodes}, {"agents", world.agents}, {"run_id", world.run_id}}));
  store_.set(key("latest"), std::to_string(world.attempt));
}

std::optional<World> Nodes::follow(int attempt) {
  if (!store_.has(key("world", attempt))) return std::nullopt;
  const auto value = nlohmann::json::parse(read(fmt::format("world/{}", attempt)));
  World world{.nodes = value.at("nodes"),
              .agents = value.at("agents"),
              .attempt = attempt,
              .run_id = value.at("run_id")};
  const auto own = std::ranges::find(world.agents, agent_);
  if (own == world.agents.end()) return std::nullopt;
  world.node_rank = static_cast<int>(own - world.agents.begin());
  beats_.clear();
  return world_ = std::move(world);
}

SessionError Nodes::missing(const std::string& address, double waited_s) {
  std::vector<std::string> came, did_not;
  if (self_.is_elastic() && agent_ > 0)
    return SessionError(
        fmt::format("the launch at {} has not taken this node within {:.3g} s "
                    "(--rendezvous-timeout): fewer than {} nodes came, or it has all its {}, "
                    "or no restart is left",
                    address, waited_s, self_.min_nodes, self_.nnodes));
  const auto numbers = self_.is_elastic() ? store_.add(key("agents"), 0) + 1 : self_.nnodes;
  for (int agent = 0; agent < numbers; ++agent) {
    if (agent != agent_ && !(self_.is_elastic() ? is_candidate(agent) : store_.has(key("node", agent)))) {
      did_not.push_back(fmt::format("node {}", agent));
      continue;
    }
    const auto node = agent == agent_ ? self_ : node_from(read(place_of(agent)));
    came.push_back(name_of(node.node_rank, node));
  }
  const auto what =
      self_.is_elastic()
          ? fmt::format(
                "{} of at least {} nodes (--nnodes {}) were at {} within {:.3g} s "
                "(--rendezvous-timeout): {}",
                came.size(), self_.min_nodes, range(self_), address, waited_s, fmt::join(came, ", "))
          : fmt::format(
                "not all nodes joined {} within {:.3g} s (--rendezvous-timeout): {} missing; joined: {}",
                address, waited_s, fmt::join(did_not, ", "), fmt::join(came, ", "));
  if (agent_ == 0) store_.set(key("missing"), what);
  return SessionError(what);
}

void Nodes::give_up(const SessionError& why) {
  if (agent_ != 0) throw why;
  stop(failure_at(0, self_, why.what()));
}

// ---- An attempt ----

Nodes::Outcome Nodes::look() {
  beat();
  if (auto why = stopped()) return {Outcome::Kind::stopped, std::move(*why)};
  if (const auto first = of_attempt("first"); store_.has(key(first)))
    return {Outcome::Kind::failed, failure_from(nlohmann::json::parse(read(first)))};
  if (const auto changed = of_attempt("changed"); store_.has(key(changed)))
    return {Outcome::Kind::changed, failure_from(nlohmann::json::parse(read(changed)))};
  if (store_.has(key(of_attempt("all_done")))) return {.kind = Outcome::Kind::done};
  if (agent_ != 0) return {};  // The loss of node 0 is seen by its store.
  if (all_have("done")) {
    store_.set(key(of_attempt("all_done")), "1");
    return {.kind = Outcome::Kind::done};
  }
  watch_the_others("done");
  admit_newcomers();
  return {};
}

std::optional<Failure> Nodes::stopped() {
  if (store_.has(key("stop"))) return failure_from(nlohmann::json::parse(read("stop")));
  if (!is_lost(agent_)) return std::nullopt;
  return failure_at(
      world_.node_rank, self_,
      fmt::format("the others go on without this node, which gave no heartbeat for {} s", lost_after_s));
}

void Nodes::beat() {
  store_.add(key("beat", agent_), 1);
  const auto now = now_ns_();
  // If this agent has not been here for a long time, it was stopped itself. Then old heartbeats prove
  // nothing.
  if (beat_ns_ != 0 && now - beat_ns_ > static_cast<std::int64_t>(lost_after_s * 0.5e9)) beats_.clear();
  beat_ns_ = now;
}

bool Nodes::has_heartbeat(int agent) {
  const auto now = now_ns_();
  const auto count = store_.add(key("beat", agent), 0);
  auto& beat = beats_[agent];
  if (count != beat.count) beat = {count, now};
  return static_cast<double>(now - beat.changed_ns) < lost_after_s * 1e9;
}

/// Nodes that have nothing more to do in this state are not lost.
void Nodes::watch_the_others(const std::string& except_who_has) {
  for (std::size_t place = 1; place < world_.agents.size(); ++place) {
    const int agent = world_.agents[place];
    if (store_.has(key(of_attempt(except_who_has), agent)) || is_lost(agent) || has_heartbeat(agent))
      continue;
    const auto node_rank = static_cast<int>(place);
    const auto& node = world_.nodes[place];
    const auto why = failure_at(
        node_rank, node, fmt::format("no heartbeat of {} for {} s", name_of(node_rank, node), lost_after_s));
    if (!self_.is_elastic()) return stop(why);
    store_.set(key("lost", agent), "1");
    change(why);
  }
}

/// Ends the attempt if a new agent can get a place. Not if a node is done already or no restart is left.
void Nodes::admit_newcomers() {
  if (!self_.is_elastic() || world_.attempt >= self_.max_restarts ||
      static_cast<int>(world_.agents.size()) == self_.nnodes)
    return;
  for (const int agent : world_.agents)
    if (store_.has(key(of_attempt("done"), agent))) return;
  for (int agent = 1; agent <= store_.add(key("agents"), 0); ++agent)
    if (std::ranges::find(world_.agents, agent) == world_.agents.end() && is_candidate(agent))
      return change(failure_at(known_[agent].node_rank, known_[agent],
                               name_of(known_[agent].node_rank, known_[agent]) + " came"));
}

void Nodes::change(const Failure& why) {
  store_.set(key(of_attempt("changed")), base::json_text(to_json(why)));
}

bool Nodes::is_lost(int agent) { return self_.is_elastic() && store_.has(key("lost", agent)); }

bool Nodes::all_have(const std::string& name) {
  return std::ranges::all_of(world_.agents,
                             [&](int agent) { return store_.has(key(of_attempt(name), agent)); });
}

void Nodes::report_failed(const Failure& failure) {
  if (store_.add(key(of_attempt("failures")), 1) == 1)
    store_.set(key(of_attempt("first")), base::json_text(to_json(failure)));
}

void Nodes::report_done() { store_.set(key(of_attempt("done"), agent_), "1"); }

void Nodes::stop(const Failure& why) {
  if (store_.add(key("stops"), 1) == 1) store_.set(key("stop"), base::json_text(to_json(why)));
}

void Nodes::report_ended(const EndedNode& ended) {
  nlohmann::json later = nlohmann::json::array();
  for (const auto& failure : ended.later) later.push_back(to_json(failure));
  store_.set(key(of_attempt("ended"), agent_), base::json_text({{"ended", ended.ended}, {"later", later}}));
}

std::optional<EndedNode> Nodes::all_ended() {
  EndedNode all;
  beat();
  if (agent_ == 0 && self_.is_elastic()) watch_the_others("ended");
  for (const int agent : world_.agents) {
    if (is_lost(agent)) continue;
    if (!store_.has(key(of_attempt("ended"), agent))) return std::nullopt;
    const auto value = nlohmann::json::parse(read(fmt::format("{}/{}", of_attempt("ended"), agent)));
    all.ended += value.at("ended").get<int>();
    for (const auto& failure : value.at("later")) all.later.push_back(failure_from(failure));
  }
  std::ranges::stable_sort(all.later, {}, &Failure::time_s);
  return all;
}

// ---- The end ----

void Nodes::leave(base::Deadline deadline) noexcept {
  if (!claimed_) return;  // This node rank belongs to another agent.
  try {
    store_.set(key("left", agent_), "1");
    if (agent_ != 0) {
      store_.has(key("left", agent_));  // The answer proves that set() has arrived.
      return;
    }
    // Waits only for agents that came: without all of them there was no world.
    const auto numbers = self_.is_elastic() ? store_.add(key("agents"), 0) + 1 : self_.nnodes;
    const auto gone = [&] {
      for (int agent = 1; agent < numbers; ++agent)
        if (store_.has(key(place_of(agent))) && !store_.has(key("left", agent)) && !is_lost(agent))
          return false;
      return true;
    };
    while (!gone() && !deadline.passed()) ipc::wait_ready(-1, 0, base::Deadline::in_seconds(leave_again_s));
  } catch (const std::exception&) {
    // The store is gone, and the other agents with it.
  }
}

}  // namespace accelmgr::agent
