// What the master model is made of: names, shapes, places. Built once with Boost.Interprocess inside the
// session's manifest region, by the manager alone and before the first fork; everybody else only reads, so
// its allocator needs no mutex.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "session/layout.hpp"

namespace accelmgr::session {

enum class Group : std::uint32_t { decay, no_decay, frozen };

/// A parameter; `first` and `count` are in elements of the flat master.
struct TensorEntry {
  std::string name;
  std::vector<std::string> aliases;  ///< Further names of the same parameter (tied weights).
  std::vector<std::int64_t> shape;
  std::uint64_t first = 0;  ///< Of its gradient, and of its values unless it shares those.
  std::uint64_t count = 0;
  Group group = Group::decay;
  /// A parameter over memory of another one (tied by storage: two gradients, one memory) has its values
  /// there: from element `shared_offset` of tensors[shares] on, with these strides. -1: it has its own.
  std::int64_t shares = -1;
  std::uint64_t shared_offset = 0;
  std::vector<std::int64_t> strides{};
};

/// A buffer; `offset` and `bytes` lie in one copy of all buffers. `dtype` is torch's scalar type number.
struct BufferEntry {
  std::string name;
  std::vector<std::string> aliases{};  ///< Further names of the same buffer.
  std::vector<std::int64_t> shape;
  std::int32_t dtype = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  bool persistent = true;  ///< Part of the model's state dict.
};

/// The name of a buffer that is none of the model's: the switches that runners take from the host's model. It
/// is in no state dict and in no checkpoint.
constexpr const char* modes_buffer = "<modes>";

/// A field of a batch, for one element; `offset` is that of the field's block in a slot of `batch_size`
/// elements.
struct FieldEntry {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int32_t dtype = 0;
  std::uint64_t offset = 0;
  std::uint64_t element_bytes = 0;
};

/// `tensors` is in the model's order. A group's tensors lie next to each other: [decay][no_decay][frozen].
struct Manifest {
  std::vector<TensorEntry> tensors;
  std::vector<BufferEntry> buffers;
  std::vector<FieldEntry> fields;

  /// Sets `first` of all tensors; returns the number of elements, gaps included.
  std::uint64_t place_tensors(Element element);
  /// Sets `offset` of all buffers; returns the bytes of one copy.
  std::uint64_t place_buffers();
  /// Sets `offset` of all fields; returns the bytes of a slot of `batch_size` elements.
  std::uint64_t place_fields(std::uint64_t batch_size);
};

/// Enough for write_manifest().
std::uint64_t manifest_bytes(const Manifest& manifest);
void write_manifest(const Manifest& manifest, std::span<std::byte> region);
/// Throws SessionError when there is none.
Manifest read_manifest(std::span<const std::byte> region);

}  // namespace accelmgr::session
