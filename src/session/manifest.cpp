#include "session/manifest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/fields.hpp"

namespace accelmgr::session {
namespace {

using nlohmann::json;

constexpr const char* what_it_is = "the manifest of the session";
constexpr auto no_product = ~std::uint64_t{0};

// The region holds a 64-bit length, then this text.
std::string encode(const Manifest& manifest) {
  auto tensors = json::array(), buffers = json::array(), fields = json::array();
  for (const auto& t : manifest.tensors)
    tensors.push_back({{"name", t.name},
                       {"aliases", t.aliases},
                       {"shape", t.shape},
                       {"first", t.first},
                       {"count", t.count},
                       {"group", static_cast<std::uint32_t>(t.group)},
                       {"shares", t.shares},
                       {"shared_offset", t.shared_offset},
                       {"strides", t.strides}});
  for (const auto& b : manifest.buffers)
    buffers.push_back({{"name", b.name},
                       {"aliases", b.aliases},
                       {"shape", b.shape},
                       {"dtype", static_cast<std::uint32_t>(b.dtype)},
                       {"offset", b.offset},
                       {"bytes", b.bytes},
                       {"persistent", b.persistent}});
  for (const auto& f : manifest.fields)
    fields.push_back({{"name", f.name},
                      {"shape", f.shape},
                      {"dtype", static_cast<std::uint32_t>(f.dtype)},
                      {"offset", f.offset},
                      {"element_bytes", f.element_bytes}});
  std::string text;
  json::to_cbor({{"tensors", tensors}, {"buffers", buffers}, {"fields", fields}}, text);
  return text;
}

std::vector<std::int64_t> shape_of(const base::Fields& entry) {
  return entry.numbers<std::int64_t>("shape", 0);
}
DType dtype_of(const base::Fields& entry) {
  return dtype_of_number(entry.number<std::uint64_t>("dtype", 0, dtype_count - 1));
}

Manifest decode(const std::string& text) {
  const auto object = base::parse_cbor(text, what_it_is);
  const base::Fields all(object, what_it_is);
  Manifest manifest;
  for (const auto& e : all.objects("tensors")) {
    const auto group = e.number<std::uint32_t>("group", 0, static_cast<std::uint32_t>(Group::frozen));
    manifest.tensors.push_back({.name = e.text("name"),
                                .aliases = e.texts("aliases"),
                                .shape = shape_of(e),
                                .first = e.number<std::uint64_t>("first"),
                                .count = e.number<std::uint64_t>("count"),
                                .group = static_cast<Group>(group),
                                .shares = e.number<std::int64_t>("shares", -1),
                                .shared_offset = e.number<std::uint64_t>("shared_offset"),
                                .strides = e.numbers<std::int64_t>("strides", 0)});
  }
  for (const auto& e : all.objects("buffers"))
    manifest.buffers.push_back({.name = e.text("name"),
                                .aliases = e.texts("aliases"),
                                .shape = shape_of(e),
                                .dtype = dtype_of(e),
                                .offset = e.number<std::uint64_t>("offset"),
                                .bytes = e.number<std::uint64_t>("bytes"),
                                .persistent = e.flag("persistent")});
  for (const auto& e : all.objects("fields"))
    manifest.fields.push_back({.name = e.text("name"),
                               .shape = shape_of(e),
                               .dtype = dtype_of(e),
                               .offset = e.number<std::uint64_t>("offset"),
                               .element_bytes = e.number<std::uint64_t>("element_bytes")});
  return manifest;
}

/// Throws SessionError unless `ok`: "the manifest of the session: tensor 'weight': count is 7; it must be 6".
void check(bool ok, const char* kind, const std::string& name, const char* field, std::uint64_t value,
           const std::string& right) {
  if (!ok)
    throw SessionError(
        fmt::format("{}: {} '{}': {} is {}; it must be {}", what_it_is, kind, name, field, value, right));
}

/// The product of `shape` and `times`, or no_product if it exceeds 64 bits. Sizes are not negative.
std::uint64_t product(const std::vector<std::int64_t>& shape, std::uint64_t times = 1) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (const auto size : shape)
    if (__builtin_mul_overflow(times, static_cast<std::uint64_t>(size), &times)) return no_product;
  return times;
}

/// One past the last element of a view that begins at `first`, or no_product if that exceeds 64 bits.
std::uint64_t end_of_view(std::uint64_t first, const std::vector<std::int64_t>& shape,
                          const std::vector<std::int64_t>& strides) {
  auto last = first;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::uint64_t reach = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(shape[d] - 1),
                               static_cast<std::uint64_t>(strides[d]), &reach) ||
        __builtin_add_overflow(last, reach, &last) || last == no_product)
      return no_product;
  }
  return last + 1;
}

void check_shared(const Manifest& manifest, std::size_t index) {
  const auto& t = manifest.tensors[index];
  const auto owner = static_cast<std::uint64_t>(t.shares);
  const bool is_owner =
      owner < manifest.tensors.size() && owner != index && manifest.tensors[owner].shares < 0;
  check(is_owner, "tensor", t.name, "shares", owner, "the number of a tensor with values of its own");
  check(t.strides.size() == t.shape.size(), "tensor", t.name, "the number of strides", t.strides.size(),
        std::to_string(t.shape.size()));
  if (t.count == 0) return;
  const auto& of = manifest.tensors[owner];
  const auto end = end_of_view(t.shared_offset, t.shape, t.strides);
  check(end <= of.count, "tensor", t.name, "the end of its values", end,
        fmt::format("at most {}, the elements of '{}'", of.count, of.name));
}

void check_tensors(const Manifest& manifest, const Header& header) {
  const auto count = manifest.tensors.size();
  if (count != header.tensors)
    throw SessionError(
        fmt::format("{} lists {} tensors; the session has {}", what_it_is, count, header.tensors));
  auto placed = manifest;
  const auto elements = placed.place_tensors(header.element);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& t = manifest.tensors[i];
    const auto of_shape = product(t.shape);
    check(t.count == of_shape, "tensor", t.name, "count", t.count, std::to_string(of_shape));
    check(t.first == placed.tensors[i].first, "tensor", t.name, "first", t.first,
          std::to_string(placed.tensors[i].first));
    check(t.first <= header.elements && t.count <= header.elements - t.first, "tensor", t.name, "count",
          t.count, fmt::format("small enough to end within the {} elements", header.elements));
    if (t.shares >= 0) check_shared(manifest, i);
  }
  if (elements != header.elements)
    throw SessionError(fmt::format("{} lists tensors of {} elements; the session has {}", what_it_is,
                                   elements, header.elements));
}

void check_buffers(const Manifest& manifest, const Header& header) {
  auto placed = manifest;
  placed.place_buffers();
  for (std::size_t i = 0; i < manifest.buffers.size(); ++i) {
    const auto& b = manifest.buffers[i];
    const auto of_shape = product(b.shape, size_of(b.dtype));
    check(b.bytes == of_shape, "buffer", b.name, "bytes", b.bytes, std::to_string(of_shape));
    check(b.offset == placed.buffers[i].offset, "buffer", b.name, "offset", b.offset,
          std::to_string(placed.buffers[i].offset));
    check(b.offset <= header.buffer_bytes && b.bytes <= header.buffer_bytes - b.offset, "buffer", b.name,
          "bytes", b.bytes, fmt::format("small enough to end within the {} bytes", header.buffer_bytes));
  }
}

void check_fields(const Manifest& manifest, const Header& header) {
  auto placed = manifest;
  placed.place_fields(header.batch_size);
  for (std::size_t i = 0; i < manifest.fields.size(); ++i) {
    const auto& f = manifest.fields[i];
    const auto of_shape = product(f.shape, size_of(f.dtype));
    check(f.element_bytes == of_shape, "field", f.name, "element_bytes", f.element_bytes,
          std::to_string(of_shape));
    check(f.offset == placed.fields[i].offset, "field", f.name, "offset", f.offset,
          std::to_string(placed.fields[i].offset));
    std::uint64_t end = 0;
    const bool overflows = __builtin_mul_overflow(f.element_bytes, header.batch_size, &end) ||
                           __builtin_add_overflow(end, f.offset, &end) ||
                           __builtin_add_overflow(end, row_guard_bytes, &end);
    check(!overflows && end <= header.slot_bytes, "field", f.name, "element_bytes", f.element_bytes,
          fmt::format("small enough for {} elements to fit into the {} bytes of a slot", header.batch_size,
                      header.slot_bytes));
  }
}

}  // namespace

std::uint64_t Manifest::place_tensors(Element element) {
  const std::uint64_t alignment = region_alignment / bytes_of(element);
  std::uint64_t at = 0;
  for (Group group : {Group::decay, Group::no_decay, Group::frozen}) {
    for (auto& tensor : tensors) {
      if (tensor.group != group) continue;
      tensor.first = at;
      at = align_up(at + tensor.count, alignment);
    }
  }
  return at;
}

std::uint64_t Manifest::place_buffers() {
  std::uint64_t at = 0;
  for (auto& buffer : buffers) {
    buffer.offset = at;
    at = align_up(at + buffer.bytes, region_alignment);
  }
  return at;
}

std::uint64_t Manifest::place_fields(std::uint64_t batch_size) {
  std::uint64_t at = 0;
  for (auto& field : fields) {
    field.offset = at;
    at = align_up(at + field.element_bytes * batch_size + row_guard_bytes, region_alignment);
  }
  return at;
}

std::uint64_t manifest_bytes(const Manifest& manifest) {
  return align_up(sizeof(std::uint64_t) + encode(manifest).size(), 4096);
}

void write_manifest(const Manifest& manifest, std::span<std::byte> region) {
  const auto text = encode(manifest);
  const std::uint64_t length = text.size();
  if (sizeof length + length > region.size())
    throw SessionError(fmt::format("{} takes {} bytes; it must fit into {}", what_it_is,
                                   sizeof length + length, region.size()));
  std::memcpy(region.data(), &length, sizeof length);
  std::memcpy(region.data() + sizeof length, text.data(), length);
}

Manifest read_manifest(const Session& session) {
  const auto region = session.manifest();
  std::uint64_t length = 0;
  if (region.size() >= sizeof length) std::memcpy(&length, region.data(), sizeof length);
  if (length == 0 || length > region.size() - sizeof length)
    throw SessionError(fmt::format("{}: its length is {}; it must be 1 to {}", what_it_is, length,
                                   std::max(region.size(), sizeof length) - sizeof length));
  // Decode a copy: a process that writes to the region meanwhile cannot change what was checked.
  const std::string text(reinterpret_cast<const char*>(region.data()) + sizeof length, length);
  auto manifest = decode(text);
  check_tensors(manifest, session.header());
  check_buffers(manifest, session.header());
  check_fields(manifest, session.header());
  return manifest;
}

}  // namespace accelmgr::session
