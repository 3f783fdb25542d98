// The names in a directory of checkpoints:
//
//   step-00000123                   a whole checkpoint; it gets this name when it is complete
//   .step-00000123.tmp-4711         process 4711 writes it, or takes it away
//   .step-00000123.replaced-4711    a whole one that has stepped aside for its successor: only for a moment,
//                                   and only where the file system cannot exchange two folders
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
/// nullopt for what is no name of folder_name().
std::optional<std::uint64_t> step_of(std::string_view name);

struct Folder {
  std::uint64_t step;
  std::filesystem::path path;
};

/// What has the name of a checkpoint, latest step first. Throws SystemError.
std::vector<Folder> list_folders(const std::filesystem::path& directory);

/// Of this process.
std::filesystem::path temporary_path(const std::filesystem::path& directory, std::uint64_t step);
std::filesystem::path replaced_path(const std::filesystem::path& directory, std::uint64_t step);

struct Leftover {
  std::uint64_t step;
  pid_t pid;
  bool replaced;  ///< Else temporary.
  std::filesystem::path path;
};

/// What is under a name of temporary_path() or replaced_path(), of any process. Throws SystemError.
std::vector<Leftover> list_leftovers(const std::filesystem::path& directory);

}  // namespace accelmgr::checkpoint
