// Collectives of tensors, with the blocking, thread and error rules of accelmgr/distributed_context.hpp,
// which also has rank, world size and groups. A tensor that is undefined, sparse, quantized, on another
// device than the CPU or a GPU, or of a dtype that no collective supports throws UsageError.
//
// Tensors on a GPU go over NCCL, on torch's current stream, or through CPU memory: README.md says when. The
// calls block until the result is there. A rank uses one GPU in a group.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <variant>

#include "accelmgr/distributed_context.hpp"

namespace accelmgr::distributed {

at::Device device();  ///< The device that device_name() names.

/// op: SUM, AVG, PRODUCT, MIN, MAX, AND, OR. Does not change the input. The result has its shape, dtype and
/// device.
at::Tensor all_reduce(const at::Tensor& tensor, const std::string& op = "SUM",
                      const GroupArgument& group = {});
/// Writes the result into `tensor` and returns it. Allocates no memory if `tensor` is contiguous.
const at::Tensor& all_reduce_(const at::Tensor& tensor, const std::string& op = "SUM",
                              const GroupArgument& group = {});

/// Concatenates the tensors of all ranks on dimension 0; they have the same shape. A 0-d tensor counts as one
/// element, also with one process.
at::Tensor all_gather(const at::Tensor& tensor, const GroupArgument& group = {});
/// A float64 tensor with one element for each rank. A process outside the group gets one element, its input.
at::Tensor all_gather(double number, const GroupArgument& group = {});

/// Returns the tensor of rank `src`. The other ranks pass a tensor of the same shape and dtype; in safe mode
/// they may pass any tensor, also an undefined one; a tensor of a GPU arrives in CPU memory then.
at::Tensor broadcast(const at::Tensor& tensor, int src = 0, bool safe_mode = false);
/// For ranks that do not know what `src` sends. Throws UsageError when `src` passes nothing, and when any
/// rank does so without safe mode.
using Broadcast = std::variant<std::monostate, at::Tensor, double, std::string>;
Broadcast broadcast(const Broadcast& anything, int src = 0, bool safe_mode = true);

/// Rank i gets block i of dimension 0, reduced over all ranks. Dimension 0 must be a multiple of the group's
/// size.
at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& op = "SUM",
                          const GroupArgument& group = {});

/// Sends block i of dimension 0 to rank i. Dimension 0 must be a multiple of the group's size. Supports
/// autograd: the gradient goes back the same way. With one process: returns the input.
at::Tensor all_to_all(const at::Tensor& input, const GroupArgument& group = {});

}  // namespace accelmgr::distributed
