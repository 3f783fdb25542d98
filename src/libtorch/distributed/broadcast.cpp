#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "accelmgr/distributed.hpp"
#include "libtorch/distributed/tensors.hpp"

namespace accelmgr::distributed {
namespace {

/// The source returns its own dense tensor, the other ranks a new one.
at::Tensor broadcast_tensor(const Members& members, const at::Tensor& tensor, int src) {
  const auto mine = dense(tensor, "broadcast");
  const bool is_source = members.communicator->rank() == src;
  auto data = is_source ? mine : empty_like(mine, mine.sizes());
  return carried(mine, std::move(data), [&](const Array& from, void* to, const OnDevice* place) {
    if (is_source && place == nullptr && to != from.data)
      std::memcpy(to, from.data, from.count() * size_of(from.dtype));
    return broadcast(members, from, to, src, place);
  });
}

/// Keeps the dense tensor in `source`; the returned array refers to its memory.
Sent sent_of(const Broadcast& anything, at::Tensor& source) {
  if (const auto* number = std::get_if<double>(&anything)) return *number;
  if (const auto* text = std::get_if<std::string>(&anything)) return *text;
  const auto* tensor = std::get_if<at::Tensor>(&anything);
  if (tensor == nullptr) return {};
  try {
    source = dense(*tensor, "broadcast").cpu();  // A receiver does not know where the tensor is.
    return array_of(source);
  } catch (const UsageError& error) {
    return Unsendable{error.what()};
  }
}

Came broadcast_safely(const Broadcast& anything, int src, const Members& members, at::Tensor& tensor) {
  const bool source = members.context.rank() == src;
  const auto make = [&](DType dtype, const std::vector<std::int64_t>& shape) {
    tensor = at::empty(shape, at::TensorOptions(scalar_type(dtype)));
    return tensor.mutable_data_ptr();
  };
  return broadcast_safely(members, source ? sent_of(anything, tensor) : Sent(), make, src);
}

Broadcast broadcast_safely(const Broadcast& anything, int src) {
  const auto members = everyone(src);
  if (!members.communicate()) {
    if (std::holds_alternative<std::monostate>(anything))
      throw UsageError("broadcast: the source rank passed no value");
    return anything;
  }
  at::Tensor tensor;
  auto came = broadcast_safely(anything, src, members, tensor);
  if (auto* number = std::get_if<double>(&came)) return *number;
  if (auto* text = std::get_if<std::string>(&came)) return std::move(*text);
  return tensor;
}

}  // namespace

at::Tensor broadcast(const at::Tensor& tensor, int src, bool safe_mode) {
  const auto members = everyone(src);
  if (!members.communicate()) {
    if (safe_mode && !tensor.defined()) throw UsageError("broadcast: the source rank passed no value");
    return tensor;
  }
  if (!safe_mode) return broadcast_tensor(members, tensor, src);
  at::Tensor result;
  const auto came =
      broadcast_safely(tensor.defined() ? Broadcast(tensor) : Broadcast(), src, members, result);
  if (!std::holds_alternative<ArrayCame>(came)) refuse_kind(came, src, "a tensor");
  return result;
}

Broadcast broadcast(const Broadcast& anything, int src, bool safe_mode) {
  if (safe_mode) return broadcast_safely(anything, src);
  if (const auto* tensor = std::get_if<at::Tensor>(&anything)) return broadcast(*tensor, src);
  if (const auto* number = std::get_if<double>(&anything)) return broadcast(*number, src);
  if (const auto* text = std::get_if<std::string>(&anything)) return broadcast(*text, src);
  throw UsageError("broadcast: no value was passed; only safe mode can receive a value of unknown kind");
}

}  // namespace accelmgr::distributed
