// Checkpoints. Training goes on bitwise from a checkpoint. Each is a folder of three files:
//
//   DIRECTORY/step-00000123/model.safetensors      parameters and buffers by their plain names: a state dict
//                           training.safetensors   all other tensors; the caller names them
//                           state.json             step, metric, the caller's state, seals of both files
//
// One process at a time may write to a directory. Any number may read meanwhile; a reader finds a checkpoint
// whole or not at all. All functions throw CheckpointError, which names the file, what is wrong, and what
// would be right.
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

#include "base/unique_fd.hpp"
#include "engine/checkpoint/safetensors_file.hpp"

namespace accelmgr::checkpoint {

/// What to save. `model` and `training` are images of whole safetensors files, made with SafetensorsLayout.
/// `metric`: lower is better; a value that is not finite counts as none. `state` is a JSON object that is
/// read back unchanged; put bytes into it with encode_base64().
struct Contents {
  std::uint64_t step = 0;
  std::optional<double> metric;
  std::span<const std::byte> model;
  std::span<const std::byte> training;
  nlohmann::json state = nlohmann::json::object();
};

struct Written {
  std::filesystem::path path;
  std::uint64_t bytes = 0;                     ///< Size of all three files.
  std::vector<std::filesystem::path> removed;  ///< Checkpoints that need not be kept any more.
  std::vector<std::string> warnings;           ///< Files and folders that could not be removed, and why.
};

/// Writes a checkpoint into `directory`, which is created if need be, and replaces an existing checkpoint of
/// this step. Then removes all checkpoints but the last `keep` (at least 1), the best, and this one. Blocks
/// until the checkpoint is on disk. If it throws, nothing of the new checkpoint is left and the existing ones
/// are untouched, unless only the last step fails, the synchronization of `directory`: then the new
/// checkpoint is in its place, but a power failure may undo it.
Written write(const std::filesystem::path& directory, const Contents& contents, std::int64_t keep);

/// An open checkpoint. Owns the mappings of its files, which may be replaced or removed meanwhile.
struct Checkpoint {
  std::filesystem::path path;
  std::uint64_t step = 0;
  std::optional<double> metric;
  nlohmann::json state;
  SafetensorsFile model;
  SafetensorsFile training;
};

/// Opens the checkpoint in the folder `path` after checking all of it: versions, sizes, checksums, structure.
Checkpoint open(const std::filesystem::path& path);

/// Opens the latest good checkpoint in `directory`. Calls `refused` with the folder of each later one that is
/// not good, and the reason. Throws, with all reasons, when there is no good one.
Checkpoint open_latest(const std::filesystem::path& directory,
                       const std::function<void(const std::filesystem::path&, const std::string&)>& refused);

/// The files of a checkpoint that have what a host has saved beside the model. They stay readable when the
/// checkpoint is replaced or removed, also for another process that gets the descriptors.
struct HostFiles {
  std::string path;  ///< The checkpoint's path, which errors name.
  base::UniqueFd state, training;
};
/// Opens these files of the checkpoint at `path`, and checks nothing.
HostFiles open_host_files(const std::filesystem::path& path);

}  // namespace accelmgr::checkpoint
