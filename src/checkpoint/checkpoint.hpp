// Checkpoints: from one, training goes on bitwise. Each is a folder of three files:
//
//   DIRECTORY/step-00000123/model.safetensors      parameters and buffers by their plain names: a state dict
//                           training.safetensors   all else that is tensors; the names are the caller's
//                           state.json             step, metric, the caller's state, seals of both files
//
// One process at a time writes to a directory; any number may read meanwhile, and finds a checkpoint whole or
// not at all. All errors are CheckpointError: they name the file, what is wrong, and what would be right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors_file.hpp"

namespace accelmgr::checkpoint {

/// `model` and `training` are whole safetensors files in memory, made along a SafetensorsLayout. `metric` is
/// the smaller the better; one that is not finite is as none. `state` is a JSON object that comes back as it
/// is; bytes go in through encode_base64().
struct Contents {
  std::uint64_t step = 0;
  std::optional<double> metric;
  std::span<const std::byte> model;
  std::span<const std::byte> training;
  nlohmann::json state = nlohmann::json::object();
};

struct Written {
  std::filesystem::path path;
  std::uint64_t bytes = 0;                     ///< Of all three files.
  std::vector<std::filesystem::path> removed;  ///< Checkpoints that need not be kept any more.
  std::vector<std::string> warnings;           ///< What could not be removed, and why.
};

/// Writes a checkpoint into `directory`, which is made if need be. A checkpoint of this step that is there is
/// replaced. Then all are removed but the last `keep` (at least 1), the best, and this one. On return it has
/// reached the disk; on an exception nothing of it is left, and what was there is untouched (but when the
/// very last, the synchronization of `directory`, fails: then it is in its place, and a power failure may
/// undo it). Blocks for as long as the disk takes.
Written write(const std::filesystem::path& directory, const Contents& contents, std::int64_t keep);

/// Owns the mappings of its files: they may be replaced or removed meanwhile.
struct Checkpoint {
  std::filesystem::path path;
  std::uint64_t step = 0;
  std::optional<double> metric;
  nlohmann::json state;
  SafetensorsFile model;
  SafetensorsFile training;
};

/// Opens the checkpoint in the folder `path`, after checking all of it: versions, sizes, checksums,
/// structure.
Checkpoint open(const std::filesystem::path& path);

/// The latest good checkpoint in `directory`. Each later one that is not good is told to `refused`, with the
/// reason. Throws when there is none, with all reasons.
Checkpoint open_latest(const std::filesystem::path& directory,
                       const std::function<void(const std::string&)>& refused);

}  // namespace accelmgr::checkpoint
