#include "collective/two_level.hpp"

#include <algorithm>
#include <cstring>

#include "collective/gloo/algorithms.hpp"
#include "collective/serial.hpp"
#include "collective/shm/factory.hpp"
#include "collective/two_level_steps.hpp"

namespace accelmgr::collective {
namespace {

using Cause = CollectiveError::Cause;

/// How much longer leaders wait for each other: where the members of a host have waited in vain for one of
/// them, their leader says so at its deadline.
constexpr std::int64_t host_margin_ns = 250'000'000;

std::string pack(const std::vector<std::string>& objects) {
  std::string packed;
  for (const auto& object : objects) {
    const std::uint64_t length = object.size();
    packed.append(reinterpret_cast<const char*>(&length), sizeof length);
    packed += object;
  }
  return packed;
}

std::vector<std::string> unpack(std::string_view packed) {
  std::vector<std::string> objects;
  while (!packed.empty()) {
    std::uint64_t length = 0;
    std::memcpy(&length, packed.data(), sizeof length);
    packed.remove_prefix(sizeof length);
    objects.emplace_back(packed.substr(0, length));
    packed.remove_prefix(length);
  }
  return objects;
}

}  // namespace

HostLayout::HostLayout(std::vector<std::vector<int>> members, int rank) : hosts(std::move(members)) {
  host = host_of(rank);
  local = local_of(rank);
}

std::size_t HostLayout::host_of(int member) const noexcept {
  const auto found = std::ranges::find_if(
      hosts, [member](const auto& host) { return std::ranges::binary_search(host, member); });
  return static_cast<std::size_t>(found - hosts.begin());
}

std::size_t HostLayout::local_of(int member) const noexcept {
  const auto& members = hosts[host_of(member)];
  return static_cast<std::size_t>(std::ranges::lower_bound(members, member) - members.begin());
}

TwoLevel::TwoLevel(Setup setup, HostLayout layout, std::shared_ptr<Communicator> local, gloo::Mesh* parent)
    : Networked(std::move(setup)), layout_(std::move(layout)), local_(std::move(local)) {
  for (const auto& members : layout_.hosts) {
    bases_.push_back(order_.size());
    order_.insert(order_.end(), members.begin(), members.end());
  }
  connect(parent);
}

std::vector<std::size_t> TwoLevel::per_host(std::size_t unit) const {
  std::vector<std::size_t> result;
  for (const auto& members : layout_.hosts) result.push_back(members.size() * unit);
  return result;
}

// What keeps a leader from connecting it tells its host, in the words in which it was told.
void TwoLevel::connect(gloo::Mesh* parent) {
  const auto deadline = setup().connect_by;
  std::string text;
  Verdict verdict{};
  if (leads()) {
    gloo::Mesh::Place place{
        leaders_of(setup().name), static_cast<int>(layout_.host), {}, setup().address, parent};
    for (const auto& members : layout_.hosts) place.ranks.push_back(setup().ranks[index(members[0])]);
    try {
      mesh_.emplace(*setup().store, std::move(place), setup().connect_timeout_s, deadline);
    } catch (const CollectiveError& error) {
      verdict = verdict_of({error.cause(), error.ranks()});
      text = error.what();
    } catch (const std::exception& error) {
      verdict = verdict_of({Cause::lost, {}});
      text = error.what();
    }
  }
  const auto options = until(deadline, leader_margin_ns);
  local_->broadcast(&verdict, sizeof verdict, DType::uint8, 0, options);
  if (verdict.kind == Verdict::Kind::go_on) return;
  throw CollectiveError(local_->broadcast_object(text, 0, options), verdict.cause,
                        {verdict.ranks.begin(), verdict.ranks.begin() + verdict.count});
}

void TwoLevel::leave(const gloo::Failure& why) noexcept {
  if (mesh_) mesh_->abandon(why);
  shm::give_up(*local_);
}

TwoLevel::Verdict TwoLevel::verdict_of(const gloo::Failure& failure) {
  Verdict verdict{Verdict::Kind::failed, failure.cause, 0, {}};
  for (const int rank : failure.ranks)
    if (verdict.count < verdict.ranks.size()) verdict.ranks[verdict.count++] = rank;
  return verdict;
}

// Of a host whose leader is late nobody knows who is.
gloo::Failure TwoLevel::whole_hosts(gloo::Failure failure) const {
  if (failure.cause != Cause::timeout) return failure;
  std::vector<int> late;
  for (const int rank : failure.ranks) {
    const auto host = std::ranges::find_if(
        layout_.hosts, [&](const auto& members) { return setup().ranks[index(members[0])] == rank; });
    if (host == layout_.hosts.end())
      late.push_back(rank);
    else
      for (const int member : *host) late.push_back(setup().ranks[index(member)]);
  }
  std::ranges::sort(late);
  late.erase(std::unique(late.begin(), late.end()), late.end());
  return {failure.cause, std::move(late)};
}

void TwoLevel::share(const Call& call, void* data, std::size_t bytes) {
  locally(call, [&](Communicator& local, const CallOptions& options) {
    local.broadcast(data, bytes, DType::uint8, 0, options);
  });
}

// Leaders show each other one signature of their host and whether all there are the same; all of them only if
// something differs.
void TwoLevel::agree(const Call& call) {
  std::vector<Signature> own(locals());
  locally(call, 0, [&](Communicator& local, const CallOptions& options) {
    local.all_gather(&call.signature, own.data(), sizeof(Signature), DType::uint8, options);
  });
  struct Summary {
    Signature signature;
    std::uint64_t all_same;
    bool operator==(const Summary&) const = default;
  };
  const Summary summary{own[0], std::ranges::all_of(own, [&](const auto& one) { return one == own[0]; })};
  const bool differ = between_hosts(call, [&](gloo::Mesh& mesh) {
    std::vector<Summary> summaries(layout_.hosts.size());
    summaries[layout_.host] = summary;
    const auto deadline = base::Deadline::at_ns(call.deadline.ns() + host_margin_ns);
    gloo::all_gather(mesh, summaries.data(), std::vector(summaries.size(), sizeof(Summary)), deadline);
    return !std::ranges::all_of(summaries,
                                [&](const Summary& one) { return one.all_same != 0 && one == summaries[0]; });
  });
  if (differ) check_agreement(call, all_signatures(call, own));
}

std::vector<Signature> TwoLevel::all_signatures(const Call& call, const std::vector<Signature>& own) {
  std::vector<Signature> by_host(world());
  std::ranges::copy(own, by_host.begin() + static_cast<std::ptrdiff_t>(bases_[layout_.host]));
  between_hosts(call, [&](gloo::Mesh& mesh) {
    gloo::all_gather(mesh, by_host.data(), per_host(sizeof(Signature)), call.deadline);
  });
  share(call, by_host.data(), by_host.size() * sizeof(Signature));
  std::vector<Signature> by_rank(world());
  for (std::size_t i = 0; i < world(); ++i) by_rank[index(order_[i])] = by_host[i];
  return by_rank;
}

void TwoLevel::barrier(const CallOptions& options) { agree(begin(CallKind::barrier, 0, options)); }

std::vector<std::string> TwoLevel::all_gather_objects(std::string_view object, const CallOptions& options) {
  const auto call = begin(CallKind::all_gather_objects, 0, options);
  agree(call);
  const auto own = locally(call, [&](Communicator& local, const CallOptions& local_options) {
    return local.all_gather_objects(object, local_options);
  });
  std::string packed;
  between_hosts(call, [&](gloo::Mesh& mesh) {
    for (const auto& of_host : gloo::all_gather_objects(mesh, pack(own), call.deadline)) packed += of_host;
  });
  packed = locally(call, [&](Communicator& local, const CallOptions& local_options) {
    return local.broadcast_object(packed, 0, local_options);
  });
  auto by_host = unpack(packed);
  std::vector<std::string> by_rank(world());
  for (std::size_t i = 0; i < world(); ++i) by_rank[index(order_[i])] = std::move(by_host[i]);
  return by_rank;
}

std::string TwoLevel::broadcast_object(std::string_view object, int root, const CallOptions& options) {
  check_member(root, "root");
  const auto call = begin(CallKind::broadcast_object, root, options);
  agree(call);
  const auto source = layout_.host_of(root);
  const auto from_local = [&](std::string_view data, std::size_t local_root) {
    return locally(call, [&](Communicator& local, const CallOptions& local_options) {
      return local.broadcast_object(data, static_cast<int>(local_root), local_options);
    });
  };
  std::string data;
  if (layout_.host == source) data = from_local(object, layout_.local_of(root));
  between_hosts(call, [&](gloo::Mesh& mesh) {
    data = gloo::broadcast_object(mesh, data, static_cast<int>(source), call.deadline);
  });
  return layout_.host == source ? data : from_local(data, 0);
}

void TwoLevel::send(std::string_view object, int to, const CallOptions& options) {
  check_peer(to);
  if (layout_.host_of(to) == layout_.host)
    local_->send(object, static_cast<int>(layout_.local_of(to)), options);
  else
    send_over_network(object, to, options);
}

std::string TwoLevel::receive(int from, const CallOptions& options) {
  check_peer(from);
  if (layout_.host_of(from) == layout_.host)
    return local_->receive(static_cast<int>(layout_.local_of(from)), options);
  return receive_over_network(from, options);
}

std::shared_ptr<Communicator> TwoLevel::group(std::span<const int> ranks, const CallOptions& options) {
  auto setup = setup_of_group(ranks, options);
  // Members by their rank in the group, on the hosts that have any.
  std::vector<std::vector<int>> members(layout_.hosts.size());
  std::vector<int> neighbours;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto host = layout_.host_of(ranks[i]);
    members[host].push_back(static_cast<int>(i));
    if (host == layout_.host) neighbours.push_back(static_cast<int>(layout_.local_of(ranks[i])));
  }
  std::erase_if(members, [](const auto& of_host) { return of_host.empty(); });
  std::ranges::sort(members);
  if (members.size() == 1) return local_->group(neighbours, options);
  // The other hosts wait for nobody whose own does not come together.
  Gathering leaders(*setup.store, leaders_of(setup.name), setup.connect_timeout_s, setup.connect_by);
  auto local = neighbours.size() == 1
                   ? make_serial()
                   : leaders.attempt([&] { return local_->group(neighbours, until(setup.connect_by, 0)); });
  const int rank = setup.rank;
  return std::make_shared<TwoLevel>(std::move(setup), HostLayout(std::move(members), rank), std::move(local),
                                    mesh_ ? &*mesh_ : nullptr);
}

}  // namespace accelmgr::collective
