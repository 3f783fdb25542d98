#include "launcher/distributed/collectives/arrays.hpp"

namespace accelmgr::distributed {

void all_reduce(const Members& members, const Array& in, void* out, ReduceOp op) {
  members.communicator->all_reduce(in.data, out, in.count(), in.dtype, op, options_for(in));
}

void all_gather(const Members& members, const Array& in, void* out) {
  members.communicator->all_gather(in.data, out, in.count(), in.dtype, options_for(in));
}

void broadcast(const Members& members, const Array& like, void* data, int src) {
  members.communicator->broadcast(data, like.count(), like.dtype, src, options_for(like));
}

void reduce_scatter(const Members& members, const Array& in, void* out, ReduceOp op) {
  const Blocks blocks(in, members.communicator->size());
  members.communicator->reduce_scatter(in.data, out, blocks.count(), in.dtype, op, options_for(in));
  blocks.check(in, "reduce_scatter");
}

void all_to_all(const Members& members, const Array& in, void* out) {
  const Blocks blocks(in, members.communicator->size());
  members.communicator->all_to_all(in.data, out, blocks.count(), in.dtype, options_for(in));
  blocks.check(in, "all_to_all");
}

}  // namespace accelmgr::distributed
