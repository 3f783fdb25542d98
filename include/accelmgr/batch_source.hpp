// Where batches come from: the interface a data source implements, and the registry of sources.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr {

/// One named tensor of an element; `shape` is without the batch dimension (empty: one number per element).
struct FieldSpec {
  std::string name{};
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape{};

  /// Bytes of this field in one element.
  std::size_t bytes() const;
};

/// Where one element is to be written: its row in a slot of shared memory, from which the model will read it.
/// No copy follows.
class ElementWriter {
 public:
  /// `rows[f]`: memory of field f; `fields` must outlive the writer.
  ElementWriter(std::span<const FieldSpec> fields, std::vector<std::span<std::byte>> rows)
      : fields_(fields), rows_(std::move(rows)) {}

  /// Memory of field `index` (contiguous, FieldSpec::bytes() long). Throws DataError when there is no such
  /// field. Who writes behind it ends the data with an error.
  std::span<std::byte> bytes(std::size_t index);
  /// Copies `value` into field `index`. Throws DataError (field, expected and actual dtype and shape) if they
  /// differ.
  void set(std::size_t index, const at::Tensor& value);

 private:
  std::span<const FieldSpec> fields_;
  std::vector<std::span<std::byte>> rows_;
};

/// A stream of elements, read by the manager's loader thread alone. Element i is dealt to device i mod
/// nprocs. An exception thrown from next() ends the data; it reaches the host as the error of the step that
/// meets it.
class BatchSource {
 public:
  static constexpr std::size_t max_state_bytes = 4000;

  virtual ~BatchSource() = default;
  /// The same at every call.
  virtual std::span<const FieldSpec> fields() const = 0;
  /// Writes the next element; false at the end of the data. May block for as long as reading takes.
  virtual bool next(ElementWriter& element) = 0;
  /// Where the source stands, as bytes from which a new source of the same configuration goes on with the
  /// same elements; at most max_state_bytes. nullopt: it cannot say, and is then read again from its
  /// beginning.
  virtual std::optional<std::string> state() const { return std::nullopt; }
  /// Of a source from which nothing was read yet: goes to where another stood at `state`. Throws DataError
  /// when `state` is none of its own.
  virtual void restore(const std::string& state);
  /// Elements never trained on, from their beginning at each call; null when there are none.
  virtual std::unique_ptr<BatchSource> held_out() { return nullptr; }
};

using DataFactory = std::function<std::unique_ptr<BatchSource>(const Config&)>;

/// Throws UsageError when the name is taken. Not thread-safe; call it before init().
void register_data(const std::string& name, DataFactory factory);

/// `config.data.kind` by name. Throws ConfigError that names the nearest known kind, DataError when the data
/// cannot be used.
std::unique_ptr<BatchSource> make_data(const Config& config);

/// Names of the built-in and the registered sources, sorted.
std::vector<std::string> data_kinds();

/// Tensors in memory: element i is row i of each tensor; `epochs` 0 is endless, order by `seed` (0: as they
/// lie). Throws DataError when there are no tensors or their first dimensions differ.
std::unique_ptr<BatchSource> tensor_source(std::vector<std::pair<std::string, at::Tensor>> tensors,
                                           int epochs, std::uint64_t seed);

}  // namespace accelmgr
