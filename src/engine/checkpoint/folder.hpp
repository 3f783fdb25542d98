// The names in a directory of checkpoints:
//
//   step-00000123                   a whole checkpoint; it gets this name when it is complete
//   step-00000123.unreadable        was the latest and could not be read, so that a run went on from another
//   .step-00000123.tmp-4711-98     being written, or being removed, by process 4711, which began at 98
//   .step-00000123.replaced-4711-98    a whole one that the process is replacing: only for a moment, and only
//                                   where the file system cannot exchange two folders
//
// The time at which a process began is in clock ticks since the machine's start (field 22 of /proc/PID/stat),
// so that a later process with the same pid is not taken for the writer. Older programs wrote the pid alone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::checkpoint {

inline constexpr const char* model_file = "model.safetensors";
inline constexpr const char* training_file = "training.safetensors";
inline constexpr const char* state_file = "state.json";

std::string folder_name(std::uint64_t step);
/// The inverse of folder_name(); nullopt for any other name.
std::optional<std::uint64_t> step_of(std::string_view name);

struct Folder {
  std::uint64_t step;
  std::filesystem::path path;
};

/// Whether the checkpoint `folder` lies in `directory`, which may end with a slash, and not below.
bool is_in(const std::filesystem::path& directory, const std::filesystem::path& folder);

/// All folders with the name of a checkpoint, latest step first. Throws SystemError.
std::vector<Folder> list_folders(const std::filesystem::path& directory);

/// The names that this process uses.
std::filesystem::path temporary_path(const std::filesystem::path& directory, std::uint64_t step);
std::filesystem::path replaced_path(const std::filesystem::path& directory, std::uint64_t step);

struct Leftover {
  std::uint64_t step;
  pid_t pid;
  std::optional<std::uint64_t> began;  ///< As in the name.
  bool replaced;                       ///< true: replaced_path(); false: temporary_path().
  std::filesystem::path path;
};

/// All files and folders with a name of temporary_path() or replaced_path(), of any process. Throws
/// SystemError.
std::vector<Leftover> list_leftovers(const std::filesystem::path& directory);

}  // namespace accelmgr::checkpoint
