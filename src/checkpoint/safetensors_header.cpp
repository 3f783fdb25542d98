#include "checkpoint/safetensors_header.hpp"

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

constexpr std::array<std::pair<std::string_view, std::uint64_t>, 10> dtypes{{{"F64", 8},
                                                                             {"F32", 4},
                                                                             {"F16", 2},
                                                                             {"BF16", 2},
                                                                             {"I64", 8},
                                                                             {"I32", 4},
                                                                             {"I16", 2},
                                                                             {"I8", 1},
                                                                             {"U8", 1},
                                                                             {"BOOL", 1}}};

[[noreturn]] void refuse(const std::string& where, const std::string& why) {
  throw CheckpointError(fmt::format("'{}' is not a whole safetensors file: {}", where, why));
}

std::string_view header_text(std::span<const std::byte> image, const std::string& where) {
  if (image.size() < safetensors_length_bytes)
    refuse(where, fmt::format("it has {} bytes, and the length of the header alone takes {}", image.size(),
                              safetensors_length_bytes));
  std::uint64_t length = 0;
  std::memcpy(&length, image.data(), sizeof length);
  if (length > safetensors_header_limit)
    refuse(where, fmt::format("its header would be {} bytes long; the format allows {}", length,
                              safetensors_header_limit));
  const auto rest = image.size() - safetensors_length_bytes;
  if (length > rest)
    refuse(where, fmt::format("its header would be {} bytes long, and {} follow", length, rest));
  const auto* text = reinterpret_cast<const char*>(image.data() + safetensors_length_bytes);
  if (length == 0 || *text != '{') refuse(where, "its header does not begin with '{'");
  return {text, length};
}

// nlohmann takes the last of several equal keys; here the second is an error. Nothing nests deeper than an
// object in the object, and the list in that: what does could only be meant to use up memory.
json parse_header(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if ((event == Event::object_start || event == Event::array_start) && depth > 2)
      refuse(where, "its header nests deeper than the format");
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
      refuse(where, fmt::format("its header has {} twice", value.dump()));
    return true;
  };
  try {
    auto header = json::parse(text, check);
    if (!header.is_object()) refuse(where, "its header is no JSON object");
    return header;
  } catch (const json::parse_error& error) {
    refuse(where, fmt::format("its header is no JSON, at byte {} of {}", error.byte, text.size()));
  } catch (const json::out_of_range& error) {
    refuse(where, fmt::format("its header has a number that is none of it: {}", error.what()));
  }
}

std::vector<std::int64_t> read_counts(const json& list, const std::string& where, const std::string& what) {
  const auto is_count = [](const json& value) {
    return value.is_number_unsigned() && std::in_range<std::int64_t>(value.get<std::uint64_t>());
  };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_count))
    refuse(where, fmt::format("{} is no list of whole numbers", what));
  return list.get<std::vector<std::int64_t>>();
}

TensorPlace read_place(const std::string& name, const json& entry, const std::string& where) {
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets") || !entry["dtype"].is_string())
    refuse(where,
           fmt::format("tensor '{}' must have a dtype, a shape and data_offsets, and nothing else", name));
  TensorPlace place;
  place.dtype = entry["dtype"];
  place.shape = read_counts(entry["shape"], where, fmt::format("the shape of tensor '{}'", name));
  const auto range =
      read_counts(entry["data_offsets"], where, fmt::format("data_offsets of tensor '{}'", name));
  if (range.size() != 2 || range[0] > range[1])
    refuse(where, fmt::format("data_offsets of tensor '{}' are [{}], not [begin, end]", name,
                              fmt::join(range, ", ")));
  place.begin = static_cast<std::uint64_t>(range[0]);
  place.bytes = static_cast<std::uint64_t>(range[1] - range[0]);
  const auto needed = tensor_bytes(fmt::format("'{}', tensor '{}'", where, name), place.dtype, place.shape);
  if (place.bytes != needed)
    refuse(where, fmt::format("tensor '{}', {} [{}], takes {} bytes and has {}", name, place.dtype,
                              fmt::join(place.shape, ", "), needed, place.bytes));
  return place;
}

void read_metadata(const json& entry, const std::string& where,
                   std::map<std::string, std::string>& metadata) {
  if (!entry.is_object()) refuse(where, fmt::format("{} is no JSON object", safetensors_metadata_key));
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string())
      refuse(where, fmt::format("'{}' in {} is no text", key, safetensors_metadata_key));
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
      refuse(where, fmt::format("tensor '{}' begins at byte {} of the data, and what is before it ends at {}",
                                *name, place->begin, end));
    end += place->bytes;
    if (end > data_bytes)
      refuse(where, fmt::format("tensor '{}' ends at byte {} of the data, of which there are {}", *name, end,
                                data_bytes));
  }
  if (end != data_bytes)
    refuse(where,
           fmt::format("its tensors end at byte {} of the data, of which there are {}", end, data_bytes));
}

}  // namespace

std::optional<std::uint64_t> dtype_bytes(std::string_view dtype) {
  const auto* const found = std::ranges::find(dtypes, dtype, [](const auto& known) { return known.first; });
  return found == dtypes.end() ? std::nullopt : std::optional(found->second);
}

std::uint64_t tensor_bytes(const std::string& where, const std::string& dtype,
                           const std::vector<std::int64_t>& shape) {
  const auto element = dtype_bytes(dtype);
  if (!element) {
    std::vector<std::string_view> known;
    for (const auto& [name, bytes] : dtypes) known.push_back(name);
    throw CheckpointError(
        fmt::format("{}: unknown dtype '{}'; known are {}", where, dtype, fmt::join(known, ", ")));
  }
  // A file counts in signed 64 bits; an empty dimension makes nothing of others, however large.
  std::int64_t bytes = static_cast<std::int64_t>(*element);
  bool countable = true;
  for (const auto size : shape) {
    if (size < 0) throw CheckpointError(fmt::format("{}: a size of {} in its shape", where, size));
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
