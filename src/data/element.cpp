#include "data/element.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <set>

#include "accelmgr/errors.hpp"

namespace accelmgr {

std::size_t FieldSpec::bytes() const {
  std::size_t bytes = c10::elementSize(dtype);
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) {
      throw DataError(fmt::format("field '{}': {} is not a shape", name, data::describe(dtype, shape)));
    }
  }
  return bytes;
}

std::span<std::byte> ElementWriter::bytes(std::size_t index) {
  if (index >= rows_.size())
    throw DataError(fmt::format("field {} is written, but an element has {} fields", index, rows_.size()));
  return rows_[index];
}

void ElementWriter::set(std::size_t index, const at::Tensor& value) {
  const std::span<std::byte> row = bytes(index);
  const FieldSpec& field = fields_[index];
  const auto expected = [&] {
    return fmt::format("field '{}': expected {}", field.name, data::describe(field.dtype, field.shape));
  };
  if (!value.defined()) throw DataError(expected() + ", got an undefined tensor");
  if (value.scalar_type() != field.dtype || value.sizes() != at::IntArrayRef(field.shape)) {
    throw DataError(expected() + ", got " + data::describe(value.scalar_type(), value.sizes()));
  }
  if (!value.device().is_cpu() || value.layout() != at::kStrided) {
    throw DataError(
        fmt::format("{} in ordinary memory of the CPU, got a tensor on {}", expected(), value.toString()));
  }
  // A conjugated or negated view carries a flag in place of the values that it stands for.
  const at::Tensor dense = value.resolve_conj().resolve_neg().contiguous();
  std::memcpy(row.data(), dense.const_data_ptr(), row.size());
}

namespace data {

std::string describe(at::ScalarType dtype, std::span<const std::int64_t> shape) {
  return fmt::format("{} [{}]", c10::getDtypeNames(dtype).first, fmt::join(shape, ", "));
}

void check_fields(std::span<const FieldSpec> fields) {
  if (fields.empty()) throw DataError("a data source must declare at least one field");
  std::set<std::string_view> names;
  for (const FieldSpec& field : fields) {
    if (field.name.empty()) throw DataError("a data source declares a field without a name");
    if (!names.insert(field.name).second) {
      throw DataError(fmt::format("a data source declares field '{}' twice", field.name));
    }
    field.bytes();
  }
}

}  // namespace data
}  // namespace accelmgr
