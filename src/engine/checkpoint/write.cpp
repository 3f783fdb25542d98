#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/fault_point.hpp"
#include "base/unmovable.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/checksum.hpp"
#include "engine/checkpoint/cleanup.hpp"
#include "engine/checkpoint/folder.hpp"
#include "engine/checkpoint/safetensors_header.hpp"
#include "engine/checkpoint/state_file.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::checkpoint {
namespace {

namespace fs = std::filesystem;

// A folder that the destructor removes, with what could not be completed or what was replaced.
class TemporaryFolder : base::Unmovable {
 public:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {
    if (mkdir(path_.c_str(), 0777) != 0)
      throw SystemError(fmt::format("making the directory '{}'", path_.string()), errno);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  const fs::path& path() const noexcept { return path_; }

 private:
  fs::path path_;
};

// Refuses images that could not be read back, before they replace a good checkpoint.
void check(const Contents& contents, std::int64_t keep) {
  if (keep < 1) throw CheckpointError(fmt::format("at least 1 checkpoint must be kept; keep is {}", keep));
  const auto name = folder_name(contents.step);
  read_safetensors_header(contents.model, fmt::format("{}/{}", name, model_file));
  read_safetensors_header(contents.training, fmt::format("{}/{}", name, training_file));
}

void check_replaceable(const fs::path& target) {
  struct stat status;
  if (stat(target.c_str(), &status) == 0 && !S_ISDIR(status.st_mode))
    throw CheckpointError(fmt::format(
        "'{}' is in the way: it is not a directory, so it is not a checkpoint to replace", target.string()));
}

std::string print_state(const Contents& contents) {
  const auto seal = [](std::span<const std::byte> image) { return Seal{image.size(), checksum_of(image)}; };
  return print_state(State{.step = contents.step,
                           .metric = contents.metric,
                           .model = seal(contents.model),
                           .training = seal(contents.training),
                           .run = contents.state});
}

void write_files(const fs::path& folder, const Contents& contents, std::span<const std::byte> state) {
  const auto write_one = [&](const char* name, std::span<const std::byte> bytes) {
    write_file(folder / name, bytes);
    base::fault_point(base::FaultPhase::checkpoint);
  };
  write_one(model_file, contents.model);
  write_one(training_file, contents.training);
  write_one(state_file, state);
  sync_directory(folder);
}

Written write_checked(const fs::path& directory, const Contents& contents, std::int64_t keep) {
  Written written;
  written.path = directory / folder_name(contents.step);
  const auto state = print_state(contents);
  written.bytes = contents.model.size() + contents.training.size() + state.size();
  make_directories(directory);
  clear_leftovers(directory, written.warnings);
  check_replaceable(written.path);
  {
    const TemporaryFolder folder(temporary_path(directory, contents.step));
    write_files(folder.path(), contents, std::as_bytes(std::span(state)));
    base::fault_point(base::FaultPhase::checkpoint);
    move_into_place(folder.path(), written.path, replaced_path(directory, contents.step));
    sync_directory(directory);
    // The replaced checkpoint is removed only now. Before the synchronization the disk may still have it
    // under the new one's name.
    remove_folder(folder.path(), written.warnings);
  }
  try {
    written.removed = prune(directory, contents.step, keep, written.warnings);
  } catch (const SystemError& error) {
    written.warnings.push_back(error.what());
  }
  return written;
}

}  // namespace

Written write(const fs::path& directory, const Contents& contents, std::int64_t keep) {
  check(contents, keep);
  return as_checkpoint_error([&] { return write_checked(directory, contents, keep); });
}

}  // namespace accelmgr::checkpoint
