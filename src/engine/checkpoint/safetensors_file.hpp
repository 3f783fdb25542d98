// A safetensors file, mapped for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/ipc/memory.hpp"

namespace accelmgr::checkpoint {

/// One tensor of a file. `bytes` points into the file's mapping.
struct Tensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Owns the mapping. Its tensors are valid as long as this object or the one it is moved to. If a process
/// shortens the file meanwhile, reading a tensor is a SIGBUS; checkpoints are never written to, only
/// replaced.
class SafetensorsFile {
 public:
  /// Maps an open file, which the caller may close afterwards, and checks the whole format. `where` is its
  /// name in errors. Throws CheckpointError.
  SafetensorsFile(int fd, const std::string& where);

  /// In alphabetical order.
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return tensors_.contains(name); }
  /// Throws CheckpointError when there is no tensor of this name.
  const Tensor& tensor(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

 private:
  std::string where_;
  ipc::Mapping mapping_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace accelmgr::checkpoint
