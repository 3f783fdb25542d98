// Defines the functions of accelmgr/batch_source.hpp that need libtorch.
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "engine/data/element.hpp"
#include "libtorch/tensor/convert.hpp"

namespace accelmgr {
namespace {

DType dtype_of_field(at::ScalarType dtype) {
  try {
    return tensor::dtype_of(dtype);
  } catch (const ModelError& error) {
    throw DataError(error.what());
  }
}

// Works also for dtypes that no field can have.
std::string described(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::getDtypeNames(tensor.scalar_type()).first,
                     fmt::join(tensor.sizes(), ", "));
}

}  // namespace

FieldDType::FieldDType(c10::ScalarType dtype) : dtype_(dtype_of_field(dtype)) {}

FieldDType::operator c10::ScalarType() const { return tensor::scalar_type(dtype_); }

void ElementWriter::set(std::size_t index, const at::Tensor& value) {
  const std::span<std::byte> row = bytes(index);
  const FieldSpec& field = fields_[index];
  const auto expected = [&] {
    return fmt::format("field '{}': expected {}", field.name, data::describe(field.dtype, field.shape));
  };
  if (!value.defined()) throw DataError(expected() + ", got an undefined tensor");
  if (field.dtype != value.scalar_type() || value.sizes() != at::IntArrayRef(field.shape))
    throw DataError(expected() + ", got " + described(value));
  if (!value.device().is_cpu() || value.layout() != at::kStrided) {
    throw DataError(fmt::format("{}, dense and on the CPU, got a {}", expected(), value.toString()));
  }
  // The memory of a conjugated or negated view has the original values; only a flag marks the view.
  const at::Tensor dense = value.resolve_conj().resolve_neg().contiguous();
  std::memcpy(row.data(), dense.const_data_ptr(), row.size());
}

}  // namespace accelmgr
