// The calls with objects: collectives, and from one member to another.
#include <fmt/format.h>

#include <cstring>

#include "collective/checks.hpp"
#include "collective/gloo/algorithms.hpp"
#include "collective/hierarchical.hpp"
#include "collective/hierarchical_steps.hpp"

namespace accelmgr::collective {
namespace {

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

std::vector<std::string> Hierarchical::all_gather_objects(std::string_view object,
                                                          const CallOptions& options) {
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

std::string Hierarchical::broadcast_object(std::string_view object, int root, const CallOptions& options) {
  check_member(root, size(), "root");
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

void Hierarchical::check_usable(const std::string& what) const {
  check_process(what);
  if (broken_) throw missing_ranks(CollectiveError::Cause::broken, what, broken_->ranks, 0);
}

void Hierarchical::check_transfer(Mailbox::Result result, const std::string& what, int peer,
                                  double timeout_s) {
  if (result == Mailbox::Result::done) return;
  using Cause = CollectiveError::Cause;
  const auto cause = result == Mailbox::Result::lost ? Cause::lost : Cause::timeout;
  broken_ = gloo::Failure{cause, {setup_.ranks[index(peer)]}};
  leave(*broken_);
  throw missing_ranks(cause, what, broken_->ranks, timeout_s);
}

void Hierarchical::send(std::string_view object, int to, const CallOptions& options) {
  check_peer(to, rank(), size());
  if (layout_.host_of(to) == layout_.host)
    return local_->send(object, static_cast<int>(layout_.local_of(to)), options);
  const auto what = fmt::format("send to rank {}", setup_.ranks[index(to)]);
  check_usable(what);
  const auto timeout_s = timeout_of(options);
  check_transfer(mailbox_.send(object, to, base::Deadline::in_seconds(timeout_s)), what, to, timeout_s);
}

std::string Hierarchical::receive(int from, const CallOptions& options) {
  check_peer(from, rank(), size());
  if (layout_.host_of(from) == layout_.host)
    return local_->receive(static_cast<int>(layout_.local_of(from)), options);
  const auto what = fmt::format("receive from rank {}", setup_.ranks[index(from)]);
  check_usable(what);
  const auto timeout_s = timeout_of(options);
  std::string object;
  check_transfer(mailbox_.receive(object, from, base::Deadline::in_seconds(timeout_s)), what, from,
                 timeout_s);
  return object;
}

}  // namespace accelmgr::collective
