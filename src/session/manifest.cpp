#include "session/manifest.hpp"

#include <boost/interprocess/allocators/allocator.hpp>
#include <boost/interprocess/containers/string.hpp>
#include <boost/interprocess/containers/vector.hpp>
#include <boost/interprocess/indexes/flat_map_index.hpp>
#include <boost/interprocess/managed_external_buffer.hpp>
#include <boost/interprocess/mem_algo/rbtree_best_fit.hpp>
#include <boost/interprocess/sync/mutex_family.hpp>

#include "accelmgr/errors.hpp"

namespace accelmgr::session {
namespace {

namespace bip = boost::interprocess;

using Buffer = bip::basic_managed_external_buffer<
    char, bip::rbtree_best_fit<bip::null_mutex_family, bip::offset_ptr<void>, 64>, bip::flat_map_index>;
template <class T>
using Allocator = bip::allocator<T, Buffer::segment_manager>;
template <class T>
using Vector = bip::vector<T, Allocator<T>>;
using String = bip::basic_string<char, std::char_traits<char>, Allocator<char>>;

// One shape for all three kinds of entries: those differ in their numbers alone.
struct StoredEntry {
  explicit StoredEntry(Buffer::segment_manager* memory) : names(memory), shape(memory), strides(memory) {}
  Vector<String> names;
  Vector<std::int64_t> shape;
  Vector<std::int64_t> strides;
  std::uint64_t kind = 0;  // Group or dtype
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::int64_t shares = -1;
  std::uint64_t shared_offset = 0;
  bool persistent = true;
};
using StoredEntries = Vector<StoredEntry>;

StoredEntry store(Buffer& buffer, const std::string& name, std::span<const std::string> aliases,
                  const std::vector<std::int64_t>& shape, std::uint64_t kind, std::uint64_t first,
                  std::uint64_t count) {
  auto* memory = buffer.get_segment_manager();
  StoredEntry entry(memory);
  entry.names.push_back(String(name.c_str(), memory));
  for (const auto& alias : aliases) entry.names.push_back(String(alias.c_str(), memory));
  entry.shape.assign(shape.begin(), shape.end());
  entry.kind = kind;
  entry.first = first;
  entry.count = count;
  return entry;
}

std::vector<std::int64_t> shape_of(const StoredEntry& entry) {
  return {entry.shape.begin(), entry.shape.end()};
}
std::string name_of(const StoredEntry& entry, std::size_t i = 0) {
  return {entry.names[i].begin(), entry.names[i].end()};
}
std::vector<std::string> aliases_of(const StoredEntry& entry) {
  std::vector<std::string> aliases;
  for (std::size_t i = 1; i < entry.names.size(); ++i) aliases.push_back(name_of(entry, i));
  return aliases;
}

const StoredEntries& find(Buffer& buffer, const char* what) {
  const auto found = buffer.find_no_lock<StoredEntries>(what).first;
  if (found == nullptr) throw SessionError(std::string("the session's manifest lists no ") + what);
  return *found;
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
  // Each allocation costs a 64-byte aligned block and its header; an entry makes two and one per name.
  std::uint64_t bytes = 16384;
  auto add = [&bytes](const std::string& name, std::span<const std::string> aliases, std::size_t dimensions) {
    const auto names = 1 + aliases.size();
    std::size_t text = name.size();
    for (const auto& alias : aliases) text += alias.size();
    bytes +=
        2 * sizeof(StoredEntry) + (names + 4) * 256 + names * sizeof(String) + text * 2 + dimensions * 32;
  };
  for (const auto& t : manifest.tensors) add(t.name, t.aliases, t.shape.size());
  for (const auto& b : manifest.buffers) add(b.name, b.aliases, b.shape.size());
  for (const auto& f : manifest.fields) add(f.name, {}, f.shape.size());
  return align_up(bytes, 4096);
}

void write_manifest(const Manifest& manifest, std::span<std::byte> region) {
  Buffer buffer(bip::create_only, region.data(), region.size());
  auto make = [&buffer](const char* what, std::size_t count) {
    auto* entries = buffer.construct<StoredEntries>(what)(buffer.get_segment_manager());
    entries->reserve(count);
    return entries;
  };
  auto* tensors = make("tensors", manifest.tensors.size());
  for (const auto& t : manifest.tensors) {
    auto entry =
        store(buffer, t.name, t.aliases, t.shape, static_cast<std::uint64_t>(t.group), t.first, t.count);
    entry.shares = t.shares;
    entry.shared_offset = t.shared_offset;
    entry.strides.assign(t.strides.begin(), t.strides.end());
    tensors->push_back(std::move(entry));
  }
  auto* buffers = make("buffers", manifest.buffers.size());
  for (const auto& b : manifest.buffers) {
    auto entry =
        store(buffer, b.name, b.aliases, b.shape, static_cast<std::uint64_t>(b.dtype), b.offset, b.bytes);
    entry.persistent = b.persistent;
    buffers->push_back(std::move(entry));
  }
  auto* fields = make("fields", manifest.fields.size());
  for (const auto& f : manifest.fields)
    fields->push_back(
        store(buffer, f.name, {}, f.shape, static_cast<std::uint64_t>(f.dtype), f.offset, f.element_bytes));
}

Manifest read_manifest(std::span<const std::byte> region) {
  // Opening writes nothing; the library has no constructor for const memory.
  Buffer buffer(bip::open_only, const_cast<std::byte*>(region.data()), region.size());
  Manifest manifest;
  for (const auto& e : find(buffer, "tensors"))
    manifest.tensors.push_back({.name = name_of(e),
                                .aliases = aliases_of(e),
                                .shape = shape_of(e),
                                .first = e.first,
                                .count = e.count,
                                .group = static_cast<Group>(e.kind),
                                .shares = e.shares,
                                .shared_offset = e.shared_offset,
                                .strides = {e.strides.begin(), e.strides.end()}});
  for (const auto& e : find(buffer, "buffers"))
    manifest.buffers.push_back({.name = name_of(e),
                                .aliases = aliases_of(e),
                                .shape = shape_of(e),
                                .dtype = static_cast<std::int32_t>(e.kind),
                                .offset = e.first,
                                .bytes = e.count,
                                .persistent = e.persistent});
  for (const auto& e : find(buffer, "fields"))
    manifest.fields.push_back({name_of(e), shape_of(e), static_cast<std::int32_t>(e.kind), e.first, e.count});
  return manifest;
}

}  // namespace accelmgr::session
