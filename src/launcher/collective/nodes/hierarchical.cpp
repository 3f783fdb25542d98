#include "launcher/collective/nodes/hierarchical.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/fnv1a.hpp"
#include "base/timing.hpp"
#include "launcher/collective/nodes/hierarchical_steps.hpp"
#include "launcher/collective/rendezvous/rendezvous.hpp"
#include "launcher/collective/serial.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "launcher/collective/signature/argument_checks.hpp"
#include "launcher/collective/tcp/algorithms.hpp"

namespace accelmgr::collective {

using Cause = CollectiveError::Cause;

NodeLayout::NodeLayout(std::vector<std::vector<int>> members, int rank) : nodes(std::move(members)) {
  node = node_of(rank);
  local = local_of(rank);
}

std::size_t NodeLayout::node_of(int member) const noexcept {
  const auto found = std::ranges::find_if(
      nodes, [member](const auto& node) { return std::ranges::binary_search(node, member); });
  return static_cast<std::size_t>(found - nodes.begin());
}

std::size_t NodeLayout::local_of(int member) const noexcept {
  const auto& members = nodes[node_of(member)];
  return static_cast<std::size_t>(std::ranges::lower_bound(members, member) - members.begin());
}

Hierarchical::Hierarchical(Setup setup, NodeLayout layout, std::shared_ptr<Communicator> local,
                           tcp::Mesh* parent)
    : setup_(std::move(setup)), layout_(std::move(layout)), local_(std::move(local)) {
  for (const auto& members : layout_.nodes) {
    bases_.push_back(order_.size());
    order_.insert(order_.end(), members.begin(), members.end());
  }
  connect(parent);
}

std::vector<std::size_t> Hierarchical::per_node(std::size_t unit) const {
  std::vector<std::size_t> result;
  for (const auto& members : layout_.nodes) result.push_back(members.size() * unit);
  return result;
}

// A leader that cannot connect tells the ranks of its node why, in the words of its own error.
void Hierarchical::connect(tcp::Mesh* parent) {
  const auto deadline = setup_.connect_by;
  std::string text;
  Verdict verdict{};
  if (leads()) {
    tcp::Mesh::Place place{
        leaders_of(setup_.name), static_cast<int>(layout_.node), {}, setup_.address, parent};
    for (const auto& members : layout_.nodes) place.ranks.push_back(setup_.ranks[index(members[0])]);
    try {
      mesh_.emplace(*setup_.store, std::move(place), setup_.connect_timeout_s, deadline);
    } catch (const CollectiveError& error) {
      verdict = {Verdict::Kind::failed, tcp::note_of({error.cause(), error.ranks()})};
      text = error.what();
    } catch (const std::exception& error) {
      verdict = {Verdict::Kind::failed, tcp::note_of({Cause::lost, {}})};
      text = error.what();
    }
  }
  const auto options = until(deadline, timing::leader_margin_ns);
  local_->broadcast(&verdict, sizeof verdict, DType::uint8, 0, options);
  if (verdict.kind == Verdict::Kind::go_on) return;
  auto failure = tcp::failure_of(verdict.failure);
  throw CollectiveError(local_->broadcast_object(text, 0, options), failure.cause, std::move(failure.ranks));
}

Hierarchical::Call Hierarchical::begin(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
                                       const CallOptions& options) {
  const auto timeout_s = timeout_of(options);
  const auto signature = make_signature(kind, count, dtype, op, root, ++calls_, options);
  if (fork_mark_.inherited()) check_process(describe(signature));
  if (broken_) throw missing_ranks(Cause::broken, numbered(signature), broken_->ranks, timeout_s);
  return {*this, signature, timeout_s};
}

void Hierarchical::fail(const Call& call, tcp::Failure failure) {
  if (!broken_) broken_ = failure;
  throw missing_ranks(failure.cause, numbered(call.signature), std::move(failure.ranks), call.timeout_s);
}

void Hierarchical::give_up() noexcept {
  if (broken_) return;
  broken_ = tcp::Failure{Cause::lost, {setup_.ranks[index(setup_.rank)]}};
  leave(*broken_);
}

void Hierarchical::check_process(std::string_view call) const {
  if (fork_mark_.inherited()) throw of_another_process(call);
}

void Hierarchical::leave(const tcp::Failure& why) noexcept {
  if (mesh_) mesh_->abandon(why);
  shm::give_up(*local_);
}

// If a leader is late, the others cannot know which rank of its node is the cause. So a timeout names all
// ranks of that node.
tcp::Failure Hierarchical::whole_nodes(tcp::Failure failure) const {
  if (failure.cause != Cause::timeout) return failure;
  std::vector<int> late;
  for (const int rank : failure.ranks) {
    const auto node = std::ranges::find_if(
        layout_.nodes, [&](const auto& members) { return setup_.ranks[index(members[0])] == rank; });
    if (node == layout_.nodes.end())
      late.push_back(rank);
    else
      for (const int member : *node) late.push_back(setup_.ranks[index(member)]);
  }
  std::ranges::sort(late);
  late.erase(std::unique(late.begin(), late.end()), late.end());
  return {failure.cause, std::move(late)};
}

void Hierarchical::share(const Call& call, void* data, std::size_t bytes) {
  locally(call, [&](Communicator& local, const CallOptions& options) {
    local.broadcast(data, bytes, DType::uint8, 0, options);
  });
}

// Leaders compare the signatures of all ranks. The other ranks get them only if something differs.
void Hierarchical::agree(const Call& call) {
  std::vector<Signature> by_node(world());
  const auto gather = [&](Communicator& local, const CallOptions& options) {
    local.all_gather(&call.signature, &by_node[bases_[layout_.node]], sizeof(Signature), DType::uint8,
                     options);
  };
  locally(call, gather, 0);
  const bool differ = nodes_differ(call, [&](tcp::Mesh& mesh) {
    const auto deadline = base::Deadline::at_ns(call.deadline.ns() + timing::leaders_margin_ns);
    tcp::all_gather(mesh, by_node.data(), per_node(sizeof(Signature)), deadline);
    return std::ranges::any_of(by_node, [&](const Signature& one) { return one != by_node[0]; });
  });
  if (!differ) return;
  share(call, by_node.data(), by_node.size() * sizeof(Signature));
  std::vector<Signature> by_rank(world());
  for (std::size_t i = 0; i < world(); ++i) by_rank[index(order_[i])] = by_node[i];
  call.ends_alike = true;
  check_same(by_rank, ranks());
}

void Hierarchical::barrier(const CallOptions& options) { agree(begin(CallKind::barrier, 0, options)); }

Hierarchical::Setup Hierarchical::setup_of_group(std::span<const int> ranks, const CallOptions& options) {
  check_process("group");
  check_group(ranks, rank(), size());
  const auto list = fmt::format("{}", fmt::join(ranks, ","));
  Setup group = setup_;
  // The name is a hash: names of groups of groups of many ranks would be too long for a store.
  group.name = fmt::format("{}/group {:016x}", setup_.world,
                           base::fnv1a(fmt::format("{} {} {}", setup_.name, list, ++groups_[list])));
  group.rank = static_cast<int>(std::ranges::find(ranks, rank()) - ranks.begin());
  group.connect_timeout_s = timeout_of(options);
  group.connect_by = base::Deadline::in_seconds(group.connect_timeout_s);
  group.ranks.clear();
  for (const int rank : ranks) group.ranks.push_back(setup_.ranks[index(rank)]);
  return group;
}

std::shared_ptr<Communicator> Hierarchical::group(std::span<const int> ranks, const CallOptions& options) {
  auto setup = setup_of_group(ranks, options);
  // The members' ranks in the group, by node; nodes without members are left out.
  std::vector<std::vector<int>> members(layout_.nodes.size());
  std::vector<int> neighbours;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto node = layout_.node_of(ranks[i]);
    members[node].push_back(static_cast<int>(i));
    if (node == layout_.node) neighbours.push_back(static_cast<int>(layout_.local_of(ranks[i])));
  }
  std::erase_if(members, [](const auto& of_node) { return of_node.empty(); });
  std::ranges::sort(members);
  if (members.size() == 1) return local_->group(neighbours, options);
  // If the members of this node cannot come together, the other nodes are told.
  Rendezvous leaders(*setup.store, leaders_of(setup.name), setup.connect_timeout_s, setup.connect_by);
  auto local = neighbours.size() == 1
                   ? make_serial(setup.ranks[index(setup.rank)])
                   : leaders.attempt([&] { return local_->group(neighbours, until(setup.connect_by, 0)); });
  const int rank = setup.rank;
  return std::make_shared<Hierarchical>(std::move(setup), NodeLayout(std::move(members), rank),
                                        std::move(local), mesh_ ? &*mesh_ : nullptr);
}

}  // namespace accelmgr::collective
