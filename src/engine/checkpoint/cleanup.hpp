// Cleans a directory of checkpoints: removes leftovers of writers that died, and checkpoints that are neither
// among the last nor the best. No failure to remove something fails a write; it becomes a warning.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/checkpoint/folder.hpp"

namespace accelmgr::checkpoint {

/// Removes `folder`, or appends the reason to `warnings`.
void remove_folder(const std::filesystem::path& folder, std::vector<std::string>& warnings);

/// Removes the leftovers of writers that have ended. A writer whose pid now belongs to this process, or to
/// one that began later, has ended too. A checkpoint that such a writer had set aside and not replaced gets
/// its name back. Throws SystemError when `directory` cannot be read.
void clear_leftovers(const std::filesystem::path& directory, std::vector<std::string>& warnings);

/// Renames a checkpoint that could not be read, so that no later one takes its place. Returns the new path.
/// Throws SystemError.
std::filesystem::path set_unreadable_aside(const std::filesystem::path& folder);

/// Keeps the last `keep` checkpoints, the one with the lowest metric (the latest of several), and that of
/// step `written`, which need not be the last one in a run that resumed from an earlier step. Removes the
/// others and returns their folders. Folders that cannot be read as checkpoints are neither counted nor
/// removed.
std::vector<std::filesystem::path> prune(const std::filesystem::path& directory, std::uint64_t written,
                                         std::int64_t keep, std::vector<std::string>& warnings);

/// Renames a checkpoint, then removes it, so that no reader finds half of it. Returns false, with the reason
/// in `warnings`, when it cannot be renamed.
bool retire(const std::filesystem::path& directory, const Folder& folder, std::vector<std::string>& warnings);

}  // namespace accelmgr::checkpoint
