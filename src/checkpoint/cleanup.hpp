// What a directory of checkpoints is relieved of: the leftovers of writers that died, and checkpoints that
// are neither among the last nor the best. Nothing here fails a write: what cannot be removed is told.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"

namespace accelmgr::checkpoint {

/// Removes `folder`, or appends to `warnings` why not.
void remove_folder(const std::filesystem::path& folder, std::vector<std::string>& warnings);

/// Removes what writers have left that live no more, or had this process's id; a checkpoint that they had put
/// aside and not replaced gets its name back. Throws SystemError when `directory` cannot be read.
void clear_leftovers(const std::filesystem::path& directory, std::vector<std::string>& warnings);

/// Keeps the last `keep` checkpoints, the one of the lowest metric (of several the latest), and that of step
/// `written`, which need not be the last in a run that was resumed from an earlier one; removes the others
/// and returns their folders. What is not known to be a checkpoint of ours is neither counted nor removed.
std::vector<std::filesystem::path> prune(const std::filesystem::path& directory, std::uint64_t written,
                                         std::int64_t keep, std::vector<std::string>& warnings);

/// Removes a checkpoint, which nobody finds by half; false, and `warnings` say why, when it cannot be
/// renamed.
bool retire(const std::filesystem::path& directory, const Folder& folder, std::vector<std::string>& warnings);

}  // namespace accelmgr::checkpoint
