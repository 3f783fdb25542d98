// The manifest lists the tensors of the master model and the fields of a batch: names, shapes, places. The
// manager writes it once, as CBOR, into the session's manifest region before it starts runners. All other
// processes only read it, and check what they read.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/dtype.hpp"
#include "session/session.hpp"

namespace accelmgr::session {

enum class Group : std::uint32_t { decay, no_decay, frozen };

/// A parameter. `first` and `count` are in elements of the flat master.
struct TensorEntry {
  std::string name;
  std::vector<std::string> aliases;  ///< Further names of the same parameter (tied weights).
  std::vector<std::int64_t> shape;
  std::uint64_t first = 0;  ///< Where its gradient begins, and its values unless `shares` is set.
  std::uint64_t count = 0;
  Group group = Group::decay;
  /// A parameter that is tied to another one by storage (one memory, two gradients) has its values there:
  /// from element `shared_offset` of tensors[shares] on, with `strides`. -1: the parameter has its own
  /// memory.
  std::int64_t shares = -1;
  std::uint64_t shared_offset = 0;
  std::vector<std::int64_t> strides{};
};

/// A buffer. `offset` is in bytes from the beginning of a copy of all buffers.
struct BufferEntry {
  std::string name;
  std::vector<std::string> aliases{};  ///< Further names of the same buffer.
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  bool persistent = true;  ///< Part of the model's state dict.
};

/// The name of a buffer that does not belong to the model: it carries switches of the host's model to the
/// runners. It is in no state dict and in no checkpoint.
constexpr const char* modes_buffer = "<modes>";

/// A field of a batch. `shape` and `element_bytes` are those of one element; `offset` is where the field's
/// values for a whole batch begin in a slot.
struct FieldEntry {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  std::uint64_t offset = 0;
  std::uint64_t element_bytes = 0;
};

/// `tensors` is in the model's order. In memory the tensors of a group lie together, in the order
/// [decay][no_decay][frozen].
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

/// The size of a region that is large enough for write_manifest().
std::uint64_t manifest_bytes(const Manifest& manifest);
/// Throws SessionError if the manifest does not fit.
void write_manifest(const Manifest& manifest, std::span<std::byte> region);
/// Reads and checks the manifest. Throws SessionError if there is none, or if its tensors, buffers and fields
/// are not where the functions of Manifest place them, within the sizes of the header.
Manifest read_manifest(const Session& session);

}  // namespace accelmgr::session
