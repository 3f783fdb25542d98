// The collectives of objects.
#include <cstring>

#include "launcher/collective/nodes/hierarchical.hpp"
#include "launcher/collective/nodes/hierarchical_steps.hpp"
#include "launcher/collective/signature/argument_checks.hpp"
#include "launcher/collective/tcp/algorithms.hpp"

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
  between_nodes(call,
                [&](tcp::Mesh& mesh) { packed = tcp::all_gather_objects(mesh, pack(own), call.deadline); });
  packed = locally(call, [&](Communicator& local, const CallOptions& local_options) {
    return local.broadcast_object(packed, 0, local_options);
  });
  auto by_node = unpack(packed);
  std::vector<std::string> by_rank(world());
  for (std::size_t i = 0; i < world(); ++i) by_rank[index(order_[i])] = std::move(by_node[i]);
  return by_rank;
}

std::string Hierarchical::broadcast_object(std::string_view object, int root, const CallOptions& options) {
  check_member(root, size(), "root");
  const auto call = begin(CallKind::broadcast_object, root, options);
  agree(call);
  const auto source = layout_.node_of(root);
  const auto from_local = [&](std::string_view data, std::size_t local_root) {
    return locally(call, [&](Communicator& local, const CallOptions& local_options) {
      return local.broadcast_object(data, static_cast<int>(local_root), local_options);
    });
  };
  std::string data;
  if (layout_.node == source) data = from_local(object, layout_.local_of(root));
  between_nodes(call, [&](tcp::Mesh& mesh) {
    data = tcp::broadcast_object(mesh, data, static_cast<int>(source), call.deadline);
  });
  return layout_.node == source ? data : from_local(data, 0);
}

}  // namespace accelmgr::collective
