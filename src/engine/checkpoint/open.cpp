#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/checksum.hpp"
#include "engine/checkpoint/folder.hpp"
#include "engine/checkpoint/state_file.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::checkpoint {
namespace {

namespace fs = std::filesystem;

// How often a reader begins again because a writer has removed what it was reading. A writer writes a whole
// checkpoint for each of these times, so more of them have another cause.
constexpr int most_tries = 100;

base::UniqueFd open_folder(const fs::path& path) {
  base::UniqueFd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder) return folder;
  if (errno == ENOENT) throw CheckpointError(fmt::format("'{}' does not exist", path.string()));
  if (errno == ENOTDIR)
    throw CheckpointError(fmt::format("'{}' is not a directory; a checkpoint is a folder", path.string()));
  throw SystemError(fmt::format("opening the directory '{}'", path.string()), errno);
}

// Whether `path` still names the folder that was opened.
bool is_still_at(const fs::path& path, int folder) {
  struct stat named, opened;
  return stat(path.c_str(), &named) == 0 && fstat(folder, &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

State read_state_of(int folder, const fs::path& path) {
  if (faccessat(folder, state_file, F_OK, 0) != 0 && errno == ENOENT) {
    const auto inside = list_folders(path);
    if (inside.empty())
      throw CheckpointError(fmt::format("'{}' is not a checkpoint: it has no {}", path.string(), state_file));
    throw CheckpointError(
        fmt::format("'{}' is not a checkpoint, but a directory of checkpoints: the latest is '{}'",
                    path.string(), inside.front().path.string()));
  }
  auto state = read_state(folder, path.string());
  const auto named = step_of(path.filename().string());
  if (named && *named != state.step)
    throw CheckpointError(fmt::format("'{}' holds step {}, but its folder is named after another step",
                                      path.string(), state.step));
  return state;
}

SafetensorsFile open_sealed(int folder, const fs::path& path, const char* name, const Seal& seal) {
  const auto where = (path / name).string();
  if (faccessat(folder, name, F_OK, 0) != 0 && errno == ENOENT)
    throw CheckpointError(fmt::format("'{}' is missing; {} bytes were written", where, seal.bytes));
  const auto fd = open_regular_file(folder, name, where);
  if (const auto bytes = file_bytes(fd.get(), where); bytes != seal.bytes)
    throw CheckpointError(
        fmt::format("'{}' is torn: it has {} bytes instead of {}", where, bytes, seal.bytes));
  if (const auto checksum = checksum_of_file(fd.get(), seal.bytes, where); checksum != seal.checksum)
    throw CheckpointError(
        fmt::format("'{}' is damaged: its checksum is {} instead of {}", where, checksum, seal.checksum));
  return {fd.get(), where};
}

// All files come from the one open folder, even if it is renamed meanwhile.
Checkpoint open_in(int folder, const fs::path& path) {
  auto state = read_state_of(folder, path);
  auto model = open_sealed(folder, path, model_file, state.model);
  auto training = open_sealed(folder, path, training_file, state.training);
  return {path, state.step, state.metric, std::move(state.run), std::move(model), std::move(training)};
}

Checkpoint open_whole(const fs::path& path) {
  for (int tries = 1;; ++tries) {
    const auto folder = open_folder(path);
    try {
      return open_in(folder.get(), path);
    } catch (const Error&) {
      if (tries == most_tries || is_still_at(path, folder.get())) throw;
    }
  }
}

struct Refusals {
  const std::function<void(const fs::path&, const std::string&)>& report;
  std::vector<std::string> reasons;

  void add(const fs::path& folder, const std::string& reason) {
    if (std::ranges::find(reasons, reason) != reasons.end()) return;
    reasons.push_back(reason);
    if (report) report(folder, reason);
  }
};

// nullopt when a folder was gone before it could be read: the writer has a later one by now.
std::optional<Checkpoint> try_latest(const fs::path& directory, Refusals& refusals) {
  for (const auto& folder : list_folders(directory)) {
    try {
      return open(folder.path);
    } catch (const CheckpointError& error) {
      std::error_code unknown;
      if (!fs::exists(fs::symlink_status(folder.path, unknown))) return std::nullopt;
      refusals.add(folder.path, error.what());
    }
  }
  if (refusals.reasons.empty())
    throw CheckpointError(fmt::format("'{}' holds no checkpoint: nothing in it is named like '{}'",
                                      directory.string(), folder_name(123)));
  throw CheckpointError(fmt::format("'{}' holds no good checkpoint: {}", directory.string(),
                                    fmt::join(refusals.reasons, "; ")));
}

}  // namespace

Checkpoint open(const fs::path& path) {
  return as_checkpoint_error([&] { return open_whole(path.has_filename() ? path : path.parent_path()); });
}

Checkpoint open_latest(const fs::path& directory,
                       const std::function<void(const fs::path&, const std::string&)>& refused) {
  Refusals refusals{refused, {}};
  for (int tries = 0; tries < most_tries; ++tries) {
    auto latest = as_checkpoint_error([&] {
      open_folder(directory);
      return try_latest(directory, refusals);
    });
    if (latest) return std::move(*latest);
  }
  throw CheckpointError(fmt::format("'{}': each checkpoint was removed before it could be read, {} times",
                                    directory.string(), most_tries));
}

HostFiles open_host_files(const fs::path& path) {
  return as_checkpoint_error([&] {
    const auto folder = open_folder(path);
    const auto opened = [&](const char* name) {
      return open_regular_file(folder.get(), name, (path / name).string());
    };
    return HostFiles{path.string(), opened(state_file), opened(training_file)};
  });
}

}  // namespace accelmgr::checkpoint
