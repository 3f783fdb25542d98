// The places of all tensors in a safetensors file to be written. The owner of the tensors copies them
// straight to their places in the file's image, without another copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace accelmgr::checkpoint {

/// A tensor to be written. `bytes` must be the size that dtype and shape give. `aliases` are further names of
/// tied weights; the metadata maps each to the tensor's name, as the official package does.
struct TensorDescription {
  std::string name;
  std::string dtype;  ///< A name that dtype_bytes() knows.
  std::vector<std::int64_t> shape;
  std::uint64_t bytes = 0;
  std::vector<std::string> aliases;
};

class SafetensorsLayout {
 public:
  /// Throws CheckpointError for an unknown dtype, a wrong size, a name that is used twice or is not UTF-8.
  explicit SafetensorsLayout(std::vector<TensorDescription> tensors,
                             std::map<std::string, std::string> metadata = {});

  std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  /// Offset of the i-th of `tensors` in bytes from the beginning of the file. The header's size is a multiple
  /// of 8, and the tensors follow in descending order of element size, so in an image that begins at a
  /// multiple of 8 every element is aligned.
  std::uint64_t offset(std::size_t i) const { return offsets_.at(i); }
  /// Writes all that is before the first tensor to `image`.
  void write_header(std::byte* image) const noexcept;

 private:
  std::string header_;
  std::vector<std::uint64_t> offsets_;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace accelmgr::checkpoint
