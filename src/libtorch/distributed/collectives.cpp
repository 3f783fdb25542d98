#include <ATen/ops/full.h>

#include <utility>

#include "accelmgr/distributed.hpp"
#include "libtorch/distributed/tensors.hpp"

namespace accelmgr::distributed {
namespace {

/// The tensor for a result: the copy that dense() made, if it made one, else a new tensor.
at::Tensor place_for_result(const at::Tensor& input, const at::Tensor& dense_input) {
  const bool copied = dense_input.numel() > 0 && dense_input.const_data_ptr() != input.const_data_ptr();
  return copied ? dense_input : empty_like(dense_input, dense_input.sizes());
}

/// place(dense tensor) returns the tensor for the result.
template <class Place>
at::Tensor reduced(const at::Tensor& tensor, const std::string& op, const GroupArgument& group, Place place) {
  const auto operation = reduce_op(op);
  const auto members = members_of(group);
  if (!members.communicate()) return tensor;
  const auto in = dense(tensor, "all_reduce");
  return carried(in, place(in), [&](const Array& mine, void* out, const OnDevice* where) {
    return all_reduce(members, mine, out, operation, where);
  });
}

}  // namespace

at::Device device() { return at::Device(device_name()); }

at::Tensor all_reduce(const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
  return reduced(tensor, op, group, [&](const at::Tensor& in) { return place_for_result(tensor, in); });
}

const at::Tensor& all_reduce_(const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
  const auto result = reduced(tensor, op, group, [](const at::Tensor& in) { return in; });
  if (result.const_data_ptr() != tensor.const_data_ptr()) tensor.detach().copy_(result);
  return tensor;
}

at::Tensor all_gather(const at::Tensor& tensor, const GroupArgument& group) {
  const auto members = members_of(group);
  if (!members.communicate())
    return tensor.defined() && tensor.dim() == 0 && members.context.world_size() == 1 ? tensor.reshape({1})
                                                                                      : tensor;
  const auto in = dense(tensor, "all_gather");
  auto shape = in.dim() == 0 ? std::vector<std::int64_t>{1} : in.sizes().vec();
  shape[0] *= members.communicator->size();
  return carried(in, empty_like(in, shape), [&](const Array& mine, void* out, const OnDevice* place) {
    return all_gather(members, mine, out, place);
  });
}

at::Tensor all_gather(double number, const GroupArgument& group) {
  return all_gather(at::full({1}, number, at::kDouble), group);
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
  const auto operation = reduce_op(op);
  const auto members = members_of(group);
  if (!members.communicate()) return tensor;
  const auto in = dense(tensor, "reduce_scatter");
  auto shape = in.sizes().vec();
  if (!shape.empty()) shape[0] /= members.communicator->size();
  return carried(in, empty_like(in, shape), [&](const Array& mine, void* out, const OnDevice* place) {
    return reduce_scatter(members, mine, out, operation, place);
  });
}

at::Tensor exchange_blocks(const at::Tensor& tensor, const Members& members) {
  const auto in = dense(tensor, "all_to_all");
  return carried(in, empty_like(in, in.sizes()), [&](const Array& mine, void* out, const OnDevice* place) {
    return all_to_all(members, mine, out, place);
  });
}

}  // namespace accelmgr::distributed
