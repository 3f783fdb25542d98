#include "engine/checkpoint/safetensors_file.hpp"

#include <fmt/format.h>

#include <utility>

#include "accelmgr/errors.hpp"
#include "base/did_you_mean.hpp"
#include "engine/checkpoint/safetensors_header.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::checkpoint {
namespace {

ipc::Mapping map_whole(int fd, const std::string& where) {
  const auto bytes = file_bytes(fd, where);
  if (bytes == 0) return {};  // An empty file cannot be mapped; reading its header reports the error.
  try {
    return {fd, 0, bytes, ipc::Access::read};
  } catch (const SystemError& error) {
    throw SystemError(fmt::format("mapping '{}'", where), error.code());
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(int fd, const std::string& where)
    : where_(where), mapping_(as_checkpoint_error([&] { return map_whole(fd, where); })) {
  const std::span<const std::byte> image(mapping_.data(), mapping_.size());
  auto header = read_safetensors_header(image, where);
  for (auto& [name, place] : header.tensors)
    tensors_[name] = {place.dtype, std::move(place.shape), image.subspan(place.begin, place.bytes)};
  metadata_ = std::move(header.metadata);
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> all;
  for (const auto& [name, tensor] : tensors_) all.push_back(name);
  return all;
}

const Tensor& SafetensorsFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    throw CheckpointError(
        fmt::format("'{}' has no tensor '{}'{}", where_, name, base::did_you_mean(name, names())));
  return found->second;
}

}  // namespace accelmgr::checkpoint
