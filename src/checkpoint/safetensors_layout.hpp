// Where everything lies in a safetensors file that is to be written: who has the tensors copies them straight
// to their places, and the file's image is made without another copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace accelmgr::checkpoint {

/// `bytes` is what the owner will copy; it must be what dtype and shape make of it. `aliases` are further
/// names of tied weights: the metadata says for each which tensor it is, as the official package does.
struct TensorDescription {
  std::string name;
  std::string dtype;  ///< As dtype_bytes() knows them.
  std::vector<std::int64_t> shape;
  std::uint64_t bytes = 0;
  std::vector<std::string> aliases;
};

class SafetensorsLayout {
 public:
  /// Throws CheckpointError: unknown dtype, bytes that do not fit, a name used twice, or one that is no
  /// UTF-8.
  explicit SafetensorsLayout(std::vector<TensorDescription> tensors,
                             std::map<std::string, std::string> metadata = {});

  std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  /// A multiple of 8. The tensors lie behind in falling order of their elements' size: in an image that
  /// begins at a multiple of 8, every element is aligned.
  std::uint64_t header_bytes() const noexcept { return header_.size(); }
  /// Of the i-th of `tensors`, from the begin of the file.
  std::uint64_t offset(std::size_t i) const { return offsets_.at(i); }
  /// Writes header_bytes() to `image`.
  void write_header(std::byte* image) const noexcept;

 private:
  std::string header_;
  std::vector<std::uint64_t> offsets_;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace accelmgr::checkpoint
