#include "engine/checkpoint/cleanup.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "engine/checkpoint/lock.hpp"
#include "engine/checkpoint/state_file.hpp"

namespace accelmgr::checkpoint {
namespace {

namespace fs = std::filesystem;

struct Candidate {
  Folder folder;
  std::optional<double> metric;
};

bool rename_or_warn(const fs::path& from, const fs::path& to, std::vector<std::string>& warnings) {
  if (rename(from.c_str(), to.c_str()) == 0) return true;
  warnings.push_back(
      fmt::format("'{}' could not be renamed to '{}': {}", from.string(), to.string(), std::strerror(errno)));
  return false;
}

std::vector<Candidate> candidates_in(const fs::path& directory, std::vector<std::string>& warnings) {
  std::vector<Candidate> candidates;
  for (auto& folder : list_folders(directory)) {
    const auto path = folder.path.string();
    try {
      const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      if (!fd) throw SystemError(fmt::format("opening the directory '{}'", path), errno);
      const auto metric = read_state(fd.get(), path).metric;
      candidates.push_back({std::move(folder), metric});
    } catch (const Error& error) {
      warnings.push_back(fmt::format("'{}' is left as it is: {}", path, error.what()));
    }
  }
  return candidates;
}

// Returns the latest step with the lowest metric; nullopt when none has a metric. `candidates` are latest
// first.
std::optional<std::uint64_t> best_step(const std::vector<Candidate>& candidates) {
  const Candidate* best = nullptr;
  for (const auto& candidate : candidates)
    if (candidate.metric && (best == nullptr || *candidate.metric < *best->metric)) best = &candidate;
  return best == nullptr ? std::nullopt : std::optional(best->folder.step);
}

}  // namespace

bool retire(const fs::path& directory, const Folder& folder, std::vector<std::string>& warnings) {
  const auto temporary = temporary_path(directory, folder.step);
  if (!rename_or_warn(folder.path, temporary, warnings)) return false;
  remove_folder(temporary, warnings);
  return true;
}

void remove_folder(const fs::path& folder, std::vector<std::string>& warnings) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error)
    warnings.push_back(fmt::format("'{}' could not be removed: {}", folder.string(), error.message()));
}

void clear_leftovers(const fs::path& directory, std::vector<std::string>& warnings) {
  for (const auto& leftover : list_leftovers(directory)) {
    if (leftover.pid != getpid() && !has_ended(leftover.pid, leftover.began)) continue;
    const auto name = directory / folder_name(leftover.step);
    std::error_code ignored;
    if (leftover.replaced && !fs::exists(name, ignored)) {
      rename_or_warn(leftover.path, name, warnings);
    } else {
      remove_folder(leftover.path, warnings);
    }
  }
}

fs::path set_unreadable_aside(const fs::path& folder) {
  for (int number = 1;; ++number) {
    auto aside = folder;
    aside += number == 1 ? std::string(".unreadable") : fmt::format(".unreadable-{}", number);
    std::error_code unknown;
    if (fs::exists(fs::symlink_status(aside, unknown))) continue;
    if (rename(folder.c_str(), aside.c_str()) != 0)
      throw SystemError(fmt::format("renaming '{}' to '{}'", folder.string(), aside.string()), errno);
    return aside;
  }
}

std::vector<fs::path> prune(const fs::path& directory, std::uint64_t written, std::int64_t keep,
                            std::vector<std::string>& warnings) {
  const auto candidates = candidates_in(directory, warnings);
  const auto best = best_step(candidates);
  std::vector<fs::path> removed;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const auto& folder = candidates[i].folder;
    const bool last = std::cmp_less(i, keep);
    if (last || folder.step == best || folder.step == written) continue;
    if (retire(directory, folder, warnings)) removed.push_back(folder.path);
  }
  if (!candidates.empty() && candidates.front().folder.step > written)
    warnings.push_back(fmt::format(
        "'{}' is of a later step than {}, which was just written; `latest` still names the later one",
        candidates.front().folder.path.string(), written));
  return removed;
}

}  // namespace accelmgr::checkpoint
