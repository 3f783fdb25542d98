// Tensors as the collectives take them: dense memory of the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "accelmgr/communicator.hpp"
#include "distributed/dtype.hpp"

namespace accelmgr::distributed {

/// Without its graph, in row-major order without gaps: the same memory if it is so already, else a copy.
/// `call` names the collective in errors. Throws UsageError for what is no dense tensor of this host (sparse,
/// quantized, undefined, of another device, of a dtype that no collective makes sense of).
at::Tensor dense(const at::Tensor& tensor, std::string_view call);

/// A new one like it, but of that shape.
at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef shape);

at::Tensor empty_cpu(at::ScalarType type, at::IntArrayRef shape);

std::size_t count_of(const at::Tensor& tensor);

/// The shape for the members' comparison; it lives as long as the tensor.
CallOptions options_for(const at::Tensor& tensor);

/// SUM, AVG, PRODUCT, MIN, MAX, AND, OR. Throws UsageError, which lists them.
ReduceOp reduce_op(const std::string& name);

/// By its place in DType, as it is told to others.
at::ScalarType scalar_type(DType dtype);

}  // namespace accelmgr::distributed
