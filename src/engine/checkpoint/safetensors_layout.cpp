#include "engine/checkpoint/safetensors_layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "accelmgr/errors.hpp"
#include "engine/checkpoint/safetensors_header.hpp"

namespace accelmgr::checkpoint {
namespace {

using nlohmann::json;

void check_bytes(const TensorDescription& tensor) {
  const auto where = fmt::format("tensor '{}'", tensor.name);
  const auto needed = tensor_bytes(where, tensor.dtype, tensor.shape);
  if (tensor.bytes != needed)
    throw CheckpointError(fmt::format("{}: {} [{}] needs {} bytes, but {} were passed", where, tensor.dtype,
                                      fmt::join(tensor.shape, ", "), needed, tensor.bytes));
}

void check_names(const std::vector<TensorDescription>& tensors) {
  std::set<std::string> names{safetensors_metadata_key};
  const auto check = [&](const std::string& name) {
    if (!names.insert(name).second)
      throw CheckpointError(fmt::format("two tensors of a safetensors file would be named '{}'", name));
  };
  for (const auto& tensor : tensors) {
    check(tensor.name);
    for (const auto& alias : tensor.aliases) check(alias);
  }
}

json metadata_with_aliases(const std::vector<TensorDescription>& tensors,
                           std::map<std::string, std::string> metadata) {
  for (const auto& tensor : tensors) {
    for (const auto& alias : tensor.aliases) {
      if (!metadata.emplace(alias, tensor.name).second)
        throw CheckpointError(fmt::format("the metadata entry '{}' has the name of an alias of tensor '{}'",
                                          alias, tensor.name));
    }
  }
  return metadata;
}

std::vector<std::size_t> by_element_size(const std::vector<TensorDescription>& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [&](std::size_t i) { return dtype_bytes(tensors[i].dtype).value(); });
  return order;
}

// The header with its length before it, padded.
std::string header_of(const json& entries) {
  std::string text;
  try {
    text = entries.dump();
  } catch (const json::type_error& error) {
    throw CheckpointError(
        fmt::format("the names and the metadata of a safetensors file must be UTF-8: {}", error.what()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), safetensors_length_bytes) + text;
}

}  // namespace

SafetensorsLayout::SafetensorsLayout(std::vector<TensorDescription> tensors,
                                     std::map<std::string, std::string> metadata)
    : offsets_(tensors.size()) {
  std::ranges::for_each(tensors, check_bytes);
  check_names(tensors);
  json entries = json::object();
  if (json texts = metadata_with_aliases(tensors, std::move(metadata)); !texts.empty())
    entries[safetensors_metadata_key] = std::move(texts);
  std::uint64_t end = 0;
  for (const auto i : by_element_size(tensors)) {
    offsets_[i] = end;
    end += tensors[i].bytes;
    entries[tensors[i].name] = {
        {"dtype", tensors[i].dtype}, {"shape", tensors[i].shape}, {"data_offsets", {offsets_[i], end}}};
  }
  header_ = header_of(entries);
  total_bytes_ = header_.size() + end;
  for (auto& offset : offsets_) offset += header_.size();
}

void SafetensorsLayout::write_header(std::byte* image) const noexcept {
  std::memcpy(image, header_.data(), header_.size());
}

}  // namespace accelmgr::checkpoint
