#include "libtorch/tensor/convert.hpp"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "accelmgr/errors.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::tensor {
namespace {

// Indexed by DType.
constexpr std::array types{at::kByte,
                           at::kChar,
                           at::kUInt16,
                           at::kShort,
                           at::kUInt32,
                           at::kInt,
                           at::kUInt64,
                           at::kLong,
                           at::kHalf,
                           at::kBFloat16,
                           at::kFloat,
                           at::kDouble,
                           at::kComplexFloat,
                           at::kComplexDouble,
                           at::kBool,
                           at::kComplexHalf,
                           at::kFloat8_e5m2,
                           at::kFloat8_e4m3fn,
                           at::kFloat8_e5m2fnuz,
                           at::kFloat8_e4m3fnuz,
                           at::kFloat8_e8m0fnu};
static_assert(types.size() == dtype_count);

void check(const char* what, const NamedTensor& named) {
  const auto& [name, tensor] = named;
  if (!tensor.defined()) throw ModelError(fmt::format("{} '{}' is undefined", what, name));
  if (!tensor.device().is_cpu())
    throw ModelError(
        fmt::format("{} '{}' is on {}; runners need it on the CPU", what, name, tensor.device().str()));
  if (tensor.layout() != at::kStrided)
    throw ModelError(fmt::format("{0} '{1}' is sparse; {0}s must be dense", what, name));
}

replica::Tensor described(const NamedTensor& named) {
  const auto& [name, tensor] = named;
  return {.name = name,
          .dtype = dtype_of(tensor.scalar_type()),
          .shape = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .data = static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())),
          .identity = reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()),
          .requires_grad = tensor.requires_grad(),
          .persistent = true};
}

}  // namespace

std::optional<DType> find_dtype(at::ScalarType type) noexcept {
  const auto* const found = std::ranges::find(types, type);
  return found == types.end() ? std::nullopt : std::optional(static_cast<DType>(found - types.begin()));
}

DType dtype_of(at::ScalarType type) {
  if (const auto dtype = find_dtype(type)) return *dtype;
  throw ModelError(fmt::format("tensors of dtype {} are not supported", at::toString(type)));
}

at::ScalarType scalar_type(DType dtype) { return types.at(static_cast<std::size_t>(dtype)); }

at::Tensor view(std::byte* memory, DType dtype, std::span<const std::int64_t> shape,
                std::span<const std::int64_t> strides) {
  return at::from_blob(memory, {shape.data(), shape.size()}, {strides.data(), strides.size()},
                       at::TensorOptions().dtype(scalar_type(dtype)));
}

at::Tensor view(std::byte* memory, DType dtype, std::span<const std::int64_t> shape) {
  return view(memory, dtype, shape, session::dense_strides(shape));
}

replica::Description describe(const std::vector<NamedTensor>& parameters,
                              const std::vector<NamedTensor>& buffers,
                              const std::vector<std::string>& non_persistent) {
  replica::Description out;
  for (const auto& parameter : parameters) {
    check("parameter", parameter);
    if (!parameter.tensor.is_leaf())
      throw ModelError(
          fmt::format("parameter '{}' is computed from others; parameters must be leaves", parameter.name));
    out.parameters.push_back(described(parameter));
  }
  for (const auto& buffer : buffers) {
    if (!buffer.tensor.defined()) continue;
    check("buffer", buffer);
    out.buffers.push_back(described(buffer));
    out.buffers.back().persistent = std::ranges::find(non_persistent, buffer.name) == non_persistent.end();
  }
  return out;
}

std::vector<NamedTensor> without_repetitions(const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> out;
  std::set<const void*> seen;
  for (const auto& named : tensors)
    if (named.tensor.defined() && seen.insert(named.tensor.unsafeGetTensorImpl()).second)
      out.push_back(named);
  return out;
}

}  // namespace accelmgr::tensor
