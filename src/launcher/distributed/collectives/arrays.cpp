#include "launcher/distributed/collectives/arrays.hpp"

namespace accelmgr::distributed {

bool all_reduce(const Members& members, const Array& in, void* out, ReduceOp op, const OnDevice* place) {
  if (place != nullptr) return members.device_group().all_reduce(in, out, op, *place);
  members.communicator->all_reduce(in.data, out, in.count(), in.dtype, op, options_for(in));
  return true;
}

bool all_gather(const Members& members, const Array& in, void* out, const OnDevice* place) {
  if (place != nullptr) return members.device_group().all_gather(in, out, *place);
  members.communicator->all_gather(in.data, out, in.count(), in.dtype, options_for(in));
  return true;
}

bool broadcast(const Members& members, const Array& like, void* data, int src, const OnDevice* place) {
  if (place != nullptr) return members.device_group().broadcast(like, data, src, *place);
  members.communicator->broadcast(data, like.count(), like.dtype, src, options_for(like));
  return true;
}

bool reduce_scatter(const Members& members, const Array& in, void* out, ReduceOp op, const OnDevice* place) {
  if (place != nullptr) return members.device_group().reduce_scatter(in, out, op, *place);
  const Blocks blocks(in, members.communicator->size());
  members.communicator->reduce_scatter(in.data, out, blocks.count(), in.dtype, op, options_for(in));
  blocks.check(in, "reduce_scatter");
  return true;
}

bool all_to_all(const Members& members, const Array& in, void* out, const OnDevice* place) {
  if (place != nullptr) return members.device_group().all_to_all(in, out, *place);
  const Blocks blocks(in, members.communicator->size());
  members.communicator->all_to_all(in.data, out, blocks.count(), in.dtype, options_for(in));
  blocks.check(in, "all_to_all");
  return true;
}

}  // namespace accelmgr::distributed
