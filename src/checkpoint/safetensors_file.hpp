// A safetensors file, mapped for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ipc/memory.hpp"

namespace accelmgr::checkpoint {

/// `bytes` lies in the mapping of its file.
struct Tensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Owns the mapping: its tensors live as long as it does, moved or not. Who shortens the file meanwhile makes
/// reading them a SIGBUS; checkpoints are never written to, only replaced.
class SafetensorsFile {
 public:
  /// Checks all that the format says. Throws CheckpointError, also when the file cannot be opened.
  explicit SafetensorsFile(const std::filesystem::path& path);
  /// Of an open file, which may be closed afterwards; `where` is its name in errors.
  SafetensorsFile(int fd, const std::string& where);

  /// In alphabetical order.
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return tensors_.contains(name); }
  /// Throws CheckpointError when there is none of this name.
  const Tensor& tensor(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

 private:
  std::string where_;
  ipc::Mapping mapping_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace accelmgr::checkpoint
