// Which run a checkpoint belongs to. A run keeps its id through all restarts: each restart goes on from a
// checkpoint of the one before.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/checkpoint/folder.hpp"

namespace accelmgr::checkpoint {

inline constexpr const char* run_id_key = "run_id";  ///< In Contents::state.

/// 16 random hexadecimal digits. Throws SystemError.
std::string new_run_id();

/// Empty when the state has none because an earlier version wrote it.
std::string run_id_of(const nlohmann::json& state);

/// The checkpoints in `directory` that have another run id than `id`, or none; latest first. Damaged ones are
/// skipped. Throws SystemError when `directory` cannot be read.
std::vector<Folder> checkpoints_of_other_runs(const std::filesystem::path& directory, const std::string& id);

}  // namespace accelmgr::checkpoint
