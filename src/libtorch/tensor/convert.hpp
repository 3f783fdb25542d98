// Conversions between torch and accelmgr: dtypes, descriptions of tensors, views of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/dtype.hpp"
#include "accelmgr/named_tensor.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::tensor {

/// Empty for a dtype that accelmgr does not have (quantized numbers, bits).
std::optional<DType> find_dtype(at::ScalarType type) noexcept;
/// Throws ModelError for a dtype that accelmgr does not have.
DType dtype_of(at::ScalarType type);
/// Throws ModelError for a dtype that this version of torch does not have.
at::ScalarType scalar_type(DType dtype);

/// A tensor over memory that it does not own.
at::Tensor view(std::byte* memory, DType dtype, std::span<const std::int64_t> shape,
                std::span<const std::int64_t> strides);
/// Row-major, without gaps.
at::Tensor view(std::byte* memory, DType dtype, std::span<const std::int64_t> shape);

/// Describes a model's tensors. A tensor that is listed several times gets one identity. `non_persistent`:
/// names of buffers that are not part of the state dict. Throws ModelError for a tensor that is undefined,
/// not on the CPU or not dense, and for a parameter that is no leaf.
replica::Description describe(const std::vector<NamedTensor>& parameters,
                              const std::vector<NamedTensor>& buffers,
                              const std::vector<std::string>& non_persistent = {});

/// Each tensor once, under its first name. This is the order of the manifest.
std::vector<NamedTensor> without_repetitions(const std::vector<NamedTensor>& tensors);

}  // namespace accelmgr::tensor
