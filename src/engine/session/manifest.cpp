#include "engine/session/manifest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/ipc/pages.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::session {
namespace {

using nlohmann::json;

constexpr const char* what_it_is = "the manifest of the session";
constexpr auto no_product = ~std::uint64_t{0};

// The region holds a 64-bit length, then this text. What follows from other values is not in it:
// read_manifest() computes it again.
std::string encode(const Manifest& manifest) {
  auto tensors = json::array(), buffers = json::array(), fields = json::array();
  for (const auto& t : manifest.tensors)
    tensors.push_back({{"name", t.name},
                       {"aliases", t.aliases},
                       {"shape", t.shape},
                       {"dtype", static_cast<std::uint32_t>(t.dtype)},
                       {"rounds", t.rounds},
                       {"group", static_cast<std::uint32_t>(t.group)},
                       {"shares", t.shares},
                       {"shared_offset", t.shared_offset},
                       {"strides", t.strides},
                       {"persistent", t.persistent}});
  for (const auto& b : manifest.buffers)
    buffers.push_back({{"name", b.name},
                       {"aliases", b.aliases},
                       {"shape", b.shape},
                       {"dtype", static_cast<std::uint32_t>(b.dtype)},
                       {"persistent", b.persistent},
                       {"of_model", b.of_model}});
  for (const auto& f : manifest.fields)
    fields.push_back({{"name", f.name}, {"shape", f.shape}, {"dtype", static_cast<std::uint32_t>(f.dtype)}});
  std::string text;
  json::to_cbor({{"bf16_runners", manifest.precision.bf16_runners},
                 {"bf16_slabs", manifest.precision.bf16_slabs},
                 {"float32_gradients", manifest.precision.float32_gradients},
                 {"tensors", tensors},
                 {"buffers", buffers},
                 {"fields", fields}},
                text);
  return text;
}

/// The product of `shape` and `times`, or no_product if it exceeds 64 bits. Sizes are not negative.
std::uint64_t product(const std::vector<std::int64_t>& shape, std::uint64_t times = 1) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (const auto size : shape)
    if (__builtin_mul_overflow(times, static_cast<std::uint64_t>(size), &times)) return no_product;
  return times;
}

std::vector<std::int64_t> shape_of(const base::Fields& entry) {
  return entry.numbers<std::int64_t>("shape", 0);
}
DType dtype_of(const base::Fields& entry) {
  return dtype_of_number(entry.number<std::uint64_t>("dtype", 0, dtype_count - 1));
}

/// Sizes that exceed 64 bits are no_product.
Manifest decode(const std::string& text) {
  const auto object = base::parse_cbor(text, what_it_is);
  const base::Fields all(object, what_it_is);
  Manifest manifest;
  manifest.precision = {.bf16_runners = all.flag("bf16_runners"),
                        .bf16_slabs = all.flag("bf16_slabs"),
                        .float32_gradients = all.flag("float32_gradients")};
  for (const auto& e : all.objects("tensors")) {
    const auto group = e.number<std::uint32_t>("group", 0, static_cast<std::uint32_t>(Group::frozen));
    auto& t =
        manifest.tensors.emplace_back(TensorEntry{.name = e.text("name"),
                                                  .aliases = e.texts("aliases"),
                                                  .shape = shape_of(e),
                                                  .dtype = dtype_of(e),
                                                  .rounds = e.flag("rounds"),
                                                  .group = static_cast<Group>(group),
                                                  .shares = e.number<std::int64_t>("shares", -1),
                                                  .shared_offset = e.number<std::uint64_t>("shared_offset"),
                                                  .strides = e.numbers<std::int64_t>("strides", 0),
                                                  .persistent = e.flag("persistent")});
    const bool own_strides = t.shares < 0 && t.strides.size() == t.shape.size();
    t.count = product(own_strides ? stored_shape(t.shape, t.strides) : t.shape);
  }
  for (const auto& e : all.objects("buffers")) {
    auto& b = manifest.buffers.emplace_back(BufferEntry{.name = e.text("name"),
                                                        .aliases = e.texts("aliases"),
                                                        .shape = shape_of(e),
                                                        .dtype = dtype_of(e),
                                                        .persistent = e.flag("persistent"),
                                                        .of_model = e.flag("of_model")});
    b.bytes = product(b.shape, size_of(b.dtype));
  }
  for (const auto& e : all.objects("fields")) {
    auto& f = manifest.fields.emplace_back(
        FieldEntry{.name = e.text("name"), .shape = shape_of(e), .dtype = dtype_of(e)});
    f.element_bytes = product(f.shape, size_of(f.dtype));
  }
  return manifest;
}

/// Throws SessionError unless `ok`: "the manifest of the session: tensor 'weight': count is 7; it must be 6".
void check(bool ok, const char* kind, const std::string& name, const char* field, std::uint64_t value,
           const std::string& right) {
  if (!ok)
    throw SessionError(
        fmt::format("{}: {} '{}': {} is {}; it must be {}", what_it_is, kind, name, field, value, right));
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

void check_strides(const TensorEntry& t) {
  check(t.strides.size() == t.shape.size(), "tensor", t.name, "the number of strides", t.strides.size(),
        std::to_string(t.shape.size()));
}

void check_own(const TensorEntry& t) {
  if (t.strides.empty()) return;
  check_strides(t);
  const auto stored = t.group == Group::frozen ? stored_shape(t.shape, t.strides) : t.shape;
  check(t.count == 0 || is_compact(stored, t.strides), "tensor", t.name, "the end of its values",
        end_of_view(0, t.shape, t.strides), fmt::format("{}, without gaps and overlaps", t.count));
}

void check_shared(const Manifest& manifest, std::size_t index) {
  const auto& t = manifest.tensors[index];
  const auto owner = static_cast<std::uint64_t>(t.shares);
  const bool is_owner =
      owner < manifest.tensors.size() && owner != index && manifest.tensors[owner].shares < 0;
  check(is_owner, "tensor", t.name, "shares", owner, "the number of a tensor with values of its own");
  check_strides(t);
  if (t.count == 0) return;
  const auto& of = manifest.tensors[owner];
  check(of.dtype == t.dtype, "tensor", t.name, "dtype", static_cast<std::uint64_t>(t.dtype),
        fmt::format("{}, that of '{}'", static_cast<int>(of.dtype), of.name));
  const auto end = end_of_view(t.shared_offset, t.shape, t.strides);
  check(end <= of.count, "tensor", t.name, "the end of its values", end,
        fmt::format("at most {}, the elements of '{}'", of.count, of.name));
}

void set_tensors(Manifest& manifest, const Header& header) {
  const auto count = manifest.tensors.size();
  if (count != header.tensors)
    throw SessionError(
        fmt::format("{} lists {} tensors; the session has {}", what_it_is, count, header.tensors));
  for (const auto& t : manifest.tensors) {
    check(t.count <= header.bytes.parameters / size_of(t.dtype), "tensor", t.name, "count", t.count,
          fmt::format("small enough to end within the {} bytes of the parameters", header.bytes.parameters));
    check(t.group == Group::frozen || element_of(t.dtype), "tensor", t.name, "dtype",
          static_cast<std::uint64_t>(t.dtype), "one of which there are gradients");
  }
  manifest.set_precision(manifest.precision);
  const auto bytes = manifest.place_tensors();
  for (std::size_t i = 0; i < count; ++i) {
    const auto& t = manifest.tensors[i];
    // The sums of place_tensors() may have overflowed.
    const auto fits = [](std::uint64_t first, std::uint64_t length, std::uint64_t room) {
      return first <= room && length <= room - first;
    };
    check(fits(t.offset, t.bytes(), header.bytes.parameters) &&
              (!t.has_room() || (fits(t.gradient, t.gradient_bytes(), header.bytes.gradient_room) &&
                                 fits(t.slab, t.slab_bytes(), header.bytes.slab_room))),
          "tensor", t.name, "count", t.count, "small enough to end within the regions of the session");
    if (t.shares >= 0)
      check_shared(manifest, i);
    else
      check_own(t);
  }
  if (bytes != header.bytes)
    throw SessionError(fmt::format(
        "{} lists tensors of {} bytes, with gradients of {}; the session has {} and {}", what_it_is,
        bytes.parameters, bytes.gradient_room, header.bytes.parameters, header.bytes.gradient_room));
}

void set_buffers(Manifest& manifest, const Header& header) {
  manifest.place_buffers();
  for (const auto& b : manifest.buffers)
    check(b.offset <= header.buffer_bytes && b.bytes <= header.buffer_bytes - b.offset, "buffer", b.name,
          "bytes", b.bytes, fmt::format("small enough to end within the {} bytes", header.buffer_bytes));
}

void set_fields(Manifest& manifest, const Header& header) {
  manifest.place_fields(header.batch_size);
  for (const auto& f : manifest.fields) {
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

std::optional<Element> element_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::float32:
    case DType::complex64:
      return Element::f32;
    case DType::float64:
    case DType::complex128:
      return Element::f64;
    case DType::bfloat16:
      return Element::bf16;
    case DType::float16:
      return Element::f16;
    default:
      return std::nullopt;
  }
}

std::uint64_t elements_in(DType dtype) noexcept {
  return dtype == DType::complex64 || dtype == DType::complex128 ? 2 : 1;
}

std::uint64_t TensorEntry::elements() const noexcept { return count * elements_in(dtype); }

std::vector<std::int64_t> TensorEntry::value_strides() const {
  return strides.empty() ? dense_strides(shape) : strides;
}

std::vector<std::int64_t> TensorEntry::gradient_strides() const {
  return !strides.empty() && is_compact(shape, strides) ? strides : dense_strides(shape);
}

DType TensorEntry::gradient_dtype() const noexcept {
  return element_of(dtype) == types.master ? dtype : DType::float32;
}

bool TensorEntry::is_expanded() const noexcept {
  if (shares >= 0 || strides.size() != shape.size()) return false;  // Not checked yet, or row-major.
  for (std::size_t d = 0; d < shape.size(); ++d)
    if (strides[d] == 0 && shape[d] > 1) return true;
  return false;
}

bool TensorEntry::has_room() const noexcept {
  return group != Group::frozen || (element_of(dtype).has_value() && !is_expanded());
}

std::uint64_t Manifest::values_of(const TensorEntry& tensor) const {
  if (tensor.shares < 0) return tensor.offset;
  return tensors[static_cast<std::size_t>(tensor.shares)].offset +
         tensor.shared_offset * size_of(tensor.dtype);
}

void Manifest::set_precision(const Precision& asked) {
  precision = asked;
  for (auto& t : tensors) {
    const bool rounds = precision.bf16_runners && t.rounds && t.dtype == DType::float32;
    t.runner_dtype = rounds ? DType::bfloat16 : t.dtype;
    if (!t.has_room()) continue;
    const auto own = element_of(t.dtype).value();
    const bool is_half = bytes_of(own) == 2;
    t.types.master = is_half && precision.float32_gradients ? Element::f32 : own;
    t.types.gradient = element_of(t.runner_dtype).value();
    t.types.slab = !is_half && precision.bf16_slabs ? Element::bf16 : t.types.gradient;
  }
}

TensorBytes Manifest::place_tensors() {
  TensorBytes at;
  // Places the tensors that `belongs` selects, one behind the other.
  const auto place = [&](auto&& belongs) {
    at.parameters = align_up(at.parameters, region_alignment);
    at.gradient_room = align_up(at.gradient_room, region_alignment);
    at.slab_room = align_up(at.slab_room, region_alignment);
    for (auto& t : tensors) {
      if (!belongs(t)) continue;
      const auto alignment = region_alignment / size_of(t.dtype);
      const auto whole = align_up(t.count, alignment);
      t.offset = at.parameters;
      at.parameters += whole * size_of(t.dtype);
      if (!t.has_room()) continue;
      t.gradient = at.gradient_room;
      t.slab = at.slab_room;
      at.gradient_room += whole * elements_in(t.dtype) * bytes_of(t.types.master);
      at.slab_room += whole * elements_in(t.dtype) * bytes_of(t.types.slab);
    }
  };
  for (const auto group : {Group::decay, Group::no_decay, Group::frozen}) {
    if (group == Group::frozen)
      at.trained = at.parameters, at.gradients = at.gradient_room, at.slab = at.slab_room;
    for (const bool has_room : {true, false})
      for (std::size_t dtype = 0; dtype < dtype_count; ++dtype)
        place([&](const TensorEntry& t) {
          return t.group == group && t.has_room() == has_room && t.dtype == static_cast<DType>(dtype);
        });
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

void allocate_unfrozen(const Session& session, const Manifest& manifest, int rank) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const auto& entry = manifest.tensors[i];
    if (session.unfrozen()[i].load() != 0)
      session.allocate_room(entry.gradient, entry.gradient_bytes(), entry.slab, entry.slab_bytes(),
                            RankMask{1} << rank);
  }
}

std::uint64_t manifest_bytes(const Manifest& manifest) {
  return ipc::whole_pages(sizeof(std::uint64_t) + encode(manifest).size());
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
  set_tensors(manifest, session.header());
  set_buffers(manifest, session.header());
  set_fields(manifest, session.header());
  return manifest;
}

}  // namespace accelmgr::session
