// What a host puts into a checkpoint and gets back from one: tensors without a library's types, and texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/dtype.hpp"

namespace accelmgr::client {

/// A tensor in memory of the host: row-major, contiguous.
struct Value {
  std::string name{};
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape{};
  const std::byte* data = nullptr;
};

/// A tensor of the host that was read from a checkpoint. Owns its memory.
struct OwnedValue {
  std::string name{};
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape{};
  std::shared_ptr<std::byte[]> data{};  ///< Laid out as Value::data. A copy of this pointer keeps the memory.
};

/// See CheckpointExtras.
struct Extras {
  std::optional<double> metric{};
  std::vector<Value> tensors{};
  std::string json = "{}";
  std::string directory{};
  std::optional<std::uint64_t> step{};  ///< The step after which they were saved; empty: the last one.
};

/// See accelmgr::Resumed.
struct ResumedFrom {
  std::string path{};
  std::uint64_t step = 0;
  std::vector<OwnedValue> tensors{};
  std::string json{};
  std::vector<std::string> refused{};
  std::string run_id{};
  std::string configuration{};
  std::uint64_t extras_step = 0;
};

}  // namespace accelmgr::client
