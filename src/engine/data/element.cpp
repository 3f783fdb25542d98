#include "engine/data/element.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "accelmgr/errors.hpp"

namespace accelmgr {

std::size_t FieldSpec::bytes() const {
  const auto number = static_cast<std::size_t>(static_cast<DType>(dtype));
  if (number >= dtype_count)
    throw DataError(fmt::format("field '{}': {} is not the number of a dtype; it must be 0 to {}", name,
                                number, dtype_count - 1));
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) {
      throw DataError(fmt::format("field '{}': {} is not a valid shape", name, data::describe(dtype, shape)));
    }
  }
  return bytes;
}

std::span<std::byte> ElementWriter::bytes(std::size_t index) {
  if (index >= rows_.size())
    throw DataError(fmt::format("field {} is written, but an element has {} fields", index, rows_.size()));
  return rows_[index];
}

namespace data {

std::string describe(DType dtype, std::span<const std::int64_t> shape) {
  return fmt::format("{} [{}]", name_of(dtype), fmt::join(shape, ", "));
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
