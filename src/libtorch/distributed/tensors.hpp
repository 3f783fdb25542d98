// Converts tensors of libtorch to the arrays of the collectives: dense memory, of the CPU or of a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>

#include "launcher/distributed/collectives/arrays.hpp"

namespace accelmgr::distributed {

/// Throws UsageError, which names the dtype, for a dtype that collectives do not support (quantized, bits,
/// 8-bit and smaller floats, complex halves).
DType dtype_of(at::ScalarType type);
/// The reverse of dtype_of(). Throws UsageError for other dtypes.
at::ScalarType scalar_type(DType dtype);

/// Returns `tensor` detached, in row-major order without gaps: the same memory if it is so already, else a
/// copy. `call` names the collective in errors. Throws UsageError for a tensor that is undefined, sparse,
/// quantized, on another device, or of a dtype that collectives do not support.
at::Tensor dense(const at::Tensor& tensor, std::string_view call);

/// Refers to a tensor from dense(), which must outlive the result.
Array array_of(const at::Tensor& dense_tensor);

/// A new tensor with the dtype and device of `tensor` and the given shape.
at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef shape);

/// A collective of arrays.hpp, of a source and the memory for its result.
using Collective = std::function<bool(const Array&, void* out, const OnDevice* place)>;

/// Makes the collective where `source`, from dense(), is. Returns `result`, which is on the same device and
/// may be `source` itself.
at::Tensor carried(const at::Tensor& source, at::Tensor result, const Collective& collective);

/// all_to_all() without autograd, among members that communicate.
at::Tensor exchange_blocks(const at::Tensor& tensor, const Members& members);

}  // namespace accelmgr::distributed
