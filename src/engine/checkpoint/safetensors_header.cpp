#include "engine/checkpoint/safetensors_header.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "accelmgr/errors.hpp"

namespace accelmgr::checkpoint {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors lie in the file as they lie in memory");

constexpr std::array<std::pair<std::string_view, DType>, dtype_count> dtypes{
    {{"F64", DType::float64},
     {"F32", DType::float32},
     {"F16", DType::float16},
     {"BF16", DType::bfloat16},
     {"I64", DType::int64},
     {"I32", DType::int32},
     {"I16", DType::int16},
     {"I8", DType::int8},
     {"U8", DType::uint8},
     {"BOOL", DType::boolean},
     {"U16", DType::uint16},
     {"U32", DType::uint32},
     {"U64", DType::uint64},
     {"F8_E4M3", DType::float8_e4m3fn},
     {"F8_E5M2", DType::float8_e5m2},
     {"F8_E4M3FNUZ", DType::float8_e4m3fnuz},
     {"F8_E5M2FNUZ", DType::float8_e5m2fnuz},
     {"F8_E8M0", DType::float8_e8m0fnu},
     {"C64", DType::complex64},
     {"C128", DType::complex128},
     {"C32", DType::complex32}}};

[[noreturn]] void refuse_header(const std::string& where, const std::string& why) {
  throw CheckpointError(fmt::format("'{}' is not a whole safetensors file: {}", where, why));
}

std::string_view header_text(std::span<const std::byte> image, const std::string& where) {
  if (image.size() < safetensors_length_bytes)
    refuse_header(where, fmt::format("it has {} bytes, but the length of the header alone takes {}",
                                     image.size(), safetensors_length_bytes));
  std::uint64_t length = 0;
  std::memcpy(&length, image.data(), sizeof length);
  if (length > safetensors_header_limit)
    refuse_header(where, fmt::format("its header would be {} bytes long; the format allows {}", length,
                                     safetensors_header_limit));
  const auto rest = image.size() - safetensors_length_bytes;
  if (length > rest)
    refuse_header(where,
                  fmt::format("its header would be {} bytes long, but only {} bytes follow", length, rest));
  const auto* text = reinterpret_cast<const char*>(image.data() + safetensors_length_bytes);
  if (length == 0 || *text != '{') refuse_header(where, "its header does not begin with '{'");
  return {text, length};
}

// Parses the header's JSON. nlohmann takes the last of several equal keys; here a repeated key is an error.
// So is deeper nesting than the format has (a list in an object in the object), which could only serve to
// exhaust memory.
json parse_header(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if ((event == Event::object_start || event == Event::array_start) && depth > 2)
      refuse_header(where, "its header is nested deeper than the format allows");
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
      refuse_header(where, fmt::format("its header has {} twice", value.dump()));
    return true;
  };
  try {
    auto header = json::parse(text, check);
    if (!header.is_object()) refuse_header(where, "its header is not a JSON object");
    return header;
  } catch (const json::parse_error& error) {
    refuse_header(
        where, fmt::format("its header is not JSON: the error is at byte {} of {}", error.byte, text.size()));
  } catch (const json::out_of_range& error) {
    refuse_header(where, fmt::format("its header has a number out of range: {}", error.what()));
  }
}

std::vector<std::int64_t> read_counts(const json& list, const std::string& where, const std::string& what) {
  const auto is_count = [](const json& value) {
    return value.is_number_unsigned() && std::in_range<std::int64_t>(value.get<std::uint64_t>());
  };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_count))
    refuse_header(where, fmt::format("{} is not a list of whole numbers", what));
  return list.get<std::vector<std::int64_t>>();
}

TensorPlace read_place(const std::string& name, const json& entry, const std::string& where) {
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets") || !entry["dtype"].is_string())
    refuse_header(
        where,
        fmt::format("tensor '{}' must have a dtype, a shape and data_offsets, and nothing else", name));
  TensorPlace place;
  place.dtype = entry["dtype"];
  place.shape = read_counts(entry["shape"], where, fmt::format("the shape of tensor '{}'", name));
  const auto range =
      read_counts(entry["data_offsets"], where, fmt::format("data_offsets of tensor '{}'", name));
  if (range.size() != 2 || range[0] > range[1])
    refuse_header(where, fmt::format("data_offsets of tensor '{}' are [{}]; they must be [begin, end]", name,
                                     fmt::join(range, ", ")));
  place.begin = static_cast<std::uint64_t>(range[0]);
  place.bytes = static_cast<std::uint64_t>(range[1] - range[0]);
  const auto needed = tensor_bytes(fmt::format("'{}', tensor '{}'", where, name), place.dtype, place.shape);
  if (place.bytes != needed)
    refuse_header(where, fmt::format("tensor '{}', {} [{}], needs {} bytes but has {}", name, place.dtype,
                                     fmt::join(place.shape, ", "), needed, place.bytes));
  return place;
}

void read_metadata(const json& entry, const std::string& where,
                   std::map<std::string, std::string>& metadata) {
  if (!entry.is_object())
    refuse_header(where, fmt::format("{} is not a JSON object", safetensors_metadata_key));
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string())
      refuse_header(where, fmt::format("'{}' in {} is not a string", key, safetensors_metadata_key));
    metadata.emplace(key, value);
  }
}

void check_places(const SafetensorsHeader& header, std::uint64_t data_bytes, const std::string& where) {
  std::vector<std::pair<const std::string*, const TensorPlace*>> in_order;
  for (const auto& [name, place] : header.tensors) in_order.emplace_back(&name, &place);
  std::ranges::sort(in_order, {}, [](const auto& entry) {
    return std::pair(entry.second->begin, entry.second->begin + entry.second->bytes);
  });
  std::uint64_t end = 0;
  for (const auto& [name, place] : in_order) {
    if (place->begin != end)
      refuse_header(
          where,
          fmt::format("tensor '{}' begins at byte {} of the data, but the data before it end at byte {}",
                      *name, place->begin, end));
    end += place->bytes;
    if (end > data_bytes)
      refuse_header(
          where, fmt::format("tensor '{}' ends at byte {} of the data, but there are only {} bytes of data",
                             *name, end, data_bytes));
  }
  if (end != data_bytes)
    refuse_header(where, fmt::format("its tensors end at byte {} of the data, but there are {} bytes of data",
                                     end, data_bytes));
}

}  // namespace

std::optional<DType> dtype_in_file(std::string_view name) {
  const auto* const found = std::ranges::find(dtypes, name, [](const auto& known) { return known.first; });
  return found == dtypes.end() ? std::nullopt : std::optional(found->second);
}

std::string_view name_in_file(DType dtype) {
  return std::ranges::find(dtypes, dtype, [](const auto& known) { return known.second; })->first;
}

std::optional<std::uint64_t> dtype_bytes(std::string_view name) {
  const auto dtype = dtype_in_file(name);
  return dtype ? std::optional(size_of(*dtype)) : std::nullopt;
}

std::uint64_t tensor_bytes(const std::string& where, const std::string& dtype,
                           const std::vector<std::int64_t>& shape) {
  const auto element = dtype_bytes(dtype);
  if (!element) {
    std::vector<std::string_view> known;
    known.reserve(std::size(dtypes));
    for (const auto& [name, dtype] : dtypes) known.push_back(name);
    throw CheckpointError(
        fmt::format("{}: unknown dtype '{}'; known are {}", where, dtype, fmt::join(known, ", ")));
  }
  // Sizes are signed 64 bits. An empty dimension makes the tensor empty, however large the others are.
  std::int64_t bytes = static_cast<std::int64_t>(*element);
  bool countable = true;
  for (const auto size : shape) {
    if (size < 0)
      throw CheckpointError(
          fmt::format("{}: its shape has the size {}; sizes must be 0 or more", where, size));
    countable = !__builtin_mul_overflow(bytes, size, &bytes) && countable;
  }
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  if (!countable)
    throw CheckpointError(
        fmt::format("{}: the shape [{}] has more bytes than a file can have", where, fmt::join(shape, ", ")));
  return static_cast<std::uint64_t>(bytes);
}

SafetensorsHeader read_safetensors_header(std::span<const std::byte> image, const std::string& where) {
  const auto text = header_text(image, where);
  const auto entries = parse_header(text, where);
  SafetensorsHeader header;
  for (const auto& [name, entry] : entries.items()) {
    if (name == safetensors_metadata_key) {
      read_metadata(entry, where, header.metadata);
    } else {
      header.tensors.emplace(name, read_place(name, entry, where));
    }
  }
  const auto data_begin = safetensors_length_bytes + text.size();
  check_places(header, image.size() - data_begin, where);
  for (auto& [name, place] : header.tensors) place.begin += data_begin;
  return header;
}

}  // namespace accelmgr::checkpoint
