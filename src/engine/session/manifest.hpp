// The manifest lists the tensors of the master model and the fields of a batch: names, shapes, places. The
// manager writes it once, as CBOR, into the session's manifest region before it starts runners. All other
// processes only read it, and check what they read.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/dtype.hpp"
#include "engine/session/kernels.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::session {

enum class Group : std::uint32_t { decay, no_decay, frozen };

/// A parameter. Places are in bytes from the beginning of a region.
struct TensorEntry {
  std::string name;
  std::vector<std::string> aliases;  ///< Further names of the same parameter (tied weights).
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  DType runner_dtype = DType::float32;  ///< In runners: of the parameter and of its gradients.
  bool rounds = true;                   ///< Precision::bf16_runners applies to it.
  ElementTypes types{};                 ///< How its gradients are stored; unused if it cannot be trained.
  std::uint64_t count = 0;   ///< How many values are in memory: if it is expanded, fewer than its shape says.
  std::uint64_t offset = 0;  ///< Where its values begin in the parameters, unless `shares` is set.
  std::uint64_t gradient = 0, slab = 0;  ///< Where its gradient begins in the gradients, and in a slab.
  Group group = Group::decay;
  /// For a parameter that is tied to another one by storage (one memory, two gradients): its values begin at
  /// element `shared_offset` of tensors[shares]. -1: the parameter has its own memory.
  std::int64_t shares = -1;
  std::uint64_t shared_offset = 0;
  /// The strides of its values, in elements. Empty: row-major. Values that have their own memory fill it, in
  /// any order of the dimensions. A frozen parameter may be expanded: a dimension with stride 0 has one
  /// element in memory.
  std::vector<std::int64_t> strides{};
  bool persistent = true;  ///< Part of the model's state dict and of checkpoints.

  std::uint64_t bytes() const noexcept { return count * size_of(dtype); }
  std::vector<std::int64_t> value_strides() const;
  /// As autograd lays out gradients: the strides of the values, unless the values have gaps or overlap.
  std::vector<std::int64_t> gradient_strides() const;
  /// How many elements its gradient has; a complex number is two.
  std::uint64_t elements() const noexcept;
  std::uint64_t gradient_bytes() const noexcept { return elements() * bytes_of(types.master); }
  std::uint64_t slab_bytes() const noexcept { return elements() * bytes_of(types.slab); }
  /// The dtype of the master's gradient.
  DType gradient_dtype() const noexcept;
  bool is_expanded() const noexcept;
  /// Whether there is room for a gradient: it is trained, or may be unfrozen.
  bool has_room() const noexcept;
};

/// The type in which gradients of `dtype` are added. nullopt if torch has no gradients of that dtype.
std::optional<Element> element_of(DType dtype) noexcept;
/// How many elements a number of `dtype` has.
std::uint64_t elements_in(DType dtype) noexcept;

/// How the configuration wants parameters and gradients to be stored.
struct Precision {
  bool bf16_runners = false;       ///< `runners.parameters: bf16`
  bool bf16_slabs = false;         ///< `gradients.slab_dtype: bf16`
  bool float32_gradients = false;  ///< `gradients.dtype: float32`
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
  /// false: the host tells runners in it what it has changed. The model has no such buffer, and no
  /// checkpoint.
  bool of_model = true;
};

/// A field of a batch. `shape` and `element_bytes` are those of one element; `offset` is where the field's
/// values for a whole batch begin in a slot.
struct FieldEntry {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  std::uint64_t offset = 0;
  std::uint64_t element_bytes = 0;
};

/// `tensors` is in the model's order.
struct Manifest {
  std::vector<TensorEntry> tensors;
  std::vector<BufferEntry> buffers;
  std::vector<FieldEntry> fields;
  Precision precision{};

  /// Where the values of a tensor begin in the parameters.
  std::uint64_t values_of(const TensorEntry& tensor) const;
  /// Sets runner_dtype and types of all tensors.
  void set_precision(const Precision& asked);
  /// Sets offset, gradient and slab of all tensors. In memory the tensors of a group lie together, in the
  /// order [decay][no_decay][frozen], and in a group the tensors of a dtype. Frozen tensors that can be
  /// trained come before those that cannot. Each begins at a multiple of 64 bytes of its values.
  TensorBytes place_tensors();
  /// Sets `offset` of all buffers; returns the bytes of one copy.
  std::uint64_t place_buffers();
  /// Sets `offset` of all fields; returns the bytes of a slot of `batch_size` elements.
  std::uint64_t place_fields(std::uint64_t batch_size);
};

/// Whether the master has a gradient of the tensor: it was not frozen at the start, or was unfrozen since.
inline bool has_gradient(const Session& session, const Manifest& manifest, std::size_t tensor) {
  return manifest.tensors[tensor].group != Group::frozen ||
         session.unfrozen()[tensor].load(std::memory_order_relaxed) != 0;
}

/// Gives the slab of `rank` memory for the gradients of unfrozen tensors. Throws SessionError.
void allocate_unfrozen(const Session& session, const Manifest& manifest, int rank);

/// The size of a region that is large enough for write_manifest().
std::uint64_t manifest_bytes(const Manifest& manifest);
/// Throws SessionError if the manifest does not fit.
void write_manifest(const Manifest& manifest, std::span<std::byte> region);
/// Reads and checks the manifest. Throws SessionError if there is none, or if its tensors, buffers and fields
/// do not end within the sizes of the header where the functions of Manifest place them.
Manifest read_manifest(const Session& session);

}  // namespace accelmgr::session
