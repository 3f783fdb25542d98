#include "engine/checkpoint/run_id.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdint>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "engine/checkpoint/state_file.hpp"

namespace accelmgr::checkpoint {

namespace fs = std::filesystem;

std::string new_run_id() {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) throw SystemError("getrandom", errno);
  return fmt::format("{:016x}", number);
}

std::string run_id_of(const nlohmann::json& state) {
  const auto found = state.find(run_id_key);
  return found != state.end() && found->is_string() ? found->get<std::string>() : "";
}

std::vector<Folder> checkpoints_of_other_runs(const fs::path& directory, const std::string& id) {
  auto folders = list_folders(directory);
  std::erase_if(folders, [&](const Folder& folder) {
    const base::UniqueFd fd(::open(folder.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    try {
      return !fd || run_id_of(read_state(fd.get(), folder.path.string()).run) == id;
    } catch (const Error&) {
      return true;  // The run of a damaged checkpoint is unknown.
    }
  });
  return folders;
}

}  // namespace accelmgr::checkpoint
