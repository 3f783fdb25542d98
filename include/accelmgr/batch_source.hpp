// Where batches come from: the interface a data source implements, and the registry of sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/dtype.hpp"

// Types of libtorch. The functions that use them are defined only in builds of accelmgr with libtorch; the
// rest of this header does not need libtorch.
namespace at {
class Tensor;
}
namespace c10 {
enum class ScalarType : std::int8_t;
}

namespace accelmgr {

/// The dtype of a field. Converts from and to DType and, in programs with libtorch, at::ScalarType.
class FieldDType {
 public:
  constexpr FieldDType(DType dtype) noexcept : dtype_(dtype) {}
  /// Throws DataError for a dtype that DType does not have (quantized numbers, bits).
  FieldDType(c10::ScalarType dtype);

  constexpr operator DType() const noexcept { return dtype_; }
  operator c10::ScalarType() const;

  friend constexpr bool operator==(FieldDType, FieldDType) = default;
  friend constexpr bool operator==(FieldDType a, DType b) { return a.dtype_ == b; }
  friend bool operator==(FieldDType a, c10::ScalarType b) { return static_cast<c10::ScalarType>(a) == b; }

 private:
  DType dtype_;
};

/// One named tensor of an element. `shape` does not include the batch dimension; an empty shape means one
/// number per element.
struct FieldSpec {
  std::string name{};
  FieldDType dtype = DType::float32;
  std::vector<std::int64_t> shape{};

  /// Bytes of this field in one element. Throws DataError for an invalid shape or dtype.
  std::size_t bytes() const;
};

/// Writes one element in place: into its row of a slot in shared memory, from which the runner reads it.
class ElementWriter {
 public:
  /// `rows[f]` is the memory of field f. `fields` and the rows must outlive the writer.
  ElementWriter(std::span<const FieldSpec> fields, std::vector<std::span<std::byte>> rows)
      : fields_(fields), rows_(std::move(rows)) {}

  /// Memory of field `index`: contiguous, FieldSpec::bytes() long. Throws DataError when there is no such
  /// field. A source that writes past its end is detected; the data then ends with an error.
  std::span<std::byte> bytes(std::size_t index);
  /// Copies `value` into field `index`. Throws DataError unless `value` is a dense CPU tensor with the dtype
  /// and shape of the field; the error names the field and both dtypes and shapes.
  void set(std::size_t index, const at::Tensor& value);

 private:
  std::span<const FieldSpec> fields_;
  std::vector<std::span<std::byte>> rows_;
};

/// A stream of elements, of one epoch or several. In the manager only the loader thread reads it. While all
/// ranks take part, element i goes to rank i mod nprocs. An exception from next() ends the data; the host
/// gets it as the error of the step that needed the element.
class BatchSource {
 public:
  static constexpr std::size_t max_state_bytes = 256 * 1024;

  virtual ~BatchSource() = default;
  /// Must return the same fields at every call.
  virtual std::span<const FieldSpec> fields() const = 0;
  /// Writes the next element. Returns false at the end of the data, or at the end of an epoch if another one
  /// follows. May block for as long as reading takes.
  virtual bool next(ElementWriter& element) = 0;
  /// Whether another epoch follows the present one: the call of next() after the one that returned false
  /// begins it. No step has elements of two epochs: the last elements of an epoch make a short step, or are
  /// left out (`data.drop_last`). A source that ends no epoch need not override it.
  virtual bool more_epochs() const { return false; }
  /// The position of the source, at most max_state_bytes. A new source of the same configuration that is
  /// given these bytes continues with the same elements. nullopt: the source does not support this; a new
  /// source is then read from its beginning up to the position.
  virtual std::optional<std::string> state() const { return std::nullopt; }
  /// Moves a new source to the position `state`. Throws DataError when this kind of source did not write
  /// `state`.
  /// Requires: nothing was read from this source yet.
  virtual void restore(const std::string& state);
  /// Committed steps have consumed the first `elements` elements: next() is not asked for them again, and
  /// their memory may be freed. Later elements may still lie in queues.
  virtual void consumed(std::uint64_t /*elements*/) {}
  /// A new source of the elements that are never trained on, at their beginning. Null when there are none.
  virtual std::unique_ptr<BatchSource> held_out() { return nullptr; }
  /// How the source reads element `number`, for example "dataset[7]". Used in messages about slow reads. Any
  /// thread may call it, also while next() runs.
  virtual std::string reading(std::uint64_t /*number*/) const { return "next()"; }
};

using DataFactory = std::function<std::unique_ptr<BatchSource>(const Config&)>;

/// Throws UsageError when the name is taken. Not thread-safe.
/// Requires: init() was not called yet.
void register_data(const std::string& name, DataFactory factory);

/// Makes the source that `config.data.kind` names. Throws ConfigError for an unknown kind (the error names
/// the nearest known one), and DataError when the data cannot be used.
std::unique_ptr<BatchSource> make_data(const Config& config);

/// Names of the built-in and the registered sources, sorted.
std::vector<std::string> data_kinds();

/// A source of tensors in memory. Element i is row i of each tensor. `epochs` 0: endless. `seed` shuffles the
/// rows; 0: in order. Throws DataError when there are no tensors or their first dimensions differ.
std::unique_ptr<BatchSource> tensor_source(std::vector<std::pair<std::string, at::Tensor>> tensors,
                                           int epochs, std::uint64_t seed);

}  // namespace accelmgr
