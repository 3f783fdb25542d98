#include "engine/checkpoint/folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"
#include "base/parse_number.hpp"

namespace accelmgr::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view folder_prefix = "step-";
constexpr std::string_view temporary_mark = ".tmp-";
constexpr std::string_view replaced_mark = ".replaced-";

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) throw SystemError(fmt::format("reading the directory '{}'", directory.string()), error.value());
  return names;
}

std::optional<Leftover> leftover_of(const fs::path& directory, std::string_view name, std::string_view mark) {
  const auto at = name.find(mark);
  if (!name.starts_with('.') || at == std::string_view::npos) return std::nullopt;
  const auto step = step_of(name.substr(1, at - 1));
  const auto writer = name.substr(at + mark.size());
  const auto dash = writer.find('-');
  const auto pid = base::parse_number<pid_t>(writer.substr(0, dash));
  if (!step || !pid || *pid <= 0) return std::nullopt;
  std::optional<std::uint64_t> began;
  if (dash != std::string_view::npos) {
    began = base::parse_number<std::uint64_t>(writer.substr(dash + 1));
    if (!began) return std::nullopt;
  }
  return Leftover{*step, *pid, began, mark == replaced_mark, directory / name};
}

fs::path marked_path(const fs::path& directory, std::uint64_t step, std::string_view mark) {
  return directory /
         fmt::format(".{}{}{}-{}", folder_name(step), mark, getpid(), ipc::began_at(getpid()).value_or(0));
}

}  // namespace

std::string folder_name(std::uint64_t step) { return fmt::format("{}{:08}", folder_prefix, step); }

std::optional<std::uint64_t> step_of(std::string_view name) {
  if (!name.starts_with(folder_prefix)) return std::nullopt;
  const auto step = base::parse_number<std::uint64_t>(name.substr(folder_prefix.size()));
  return step && folder_name(*step) == name ? step : std::nullopt;
}

bool is_in(const fs::path& directory, const fs::path& folder) {
  return folder.parent_path() == (directory / "step").parent_path();
}

std::vector<Folder> list_folders(const fs::path& directory) {
  std::vector<Folder> folders;
  for (const auto& name : names_in(directory))
    if (const auto step = step_of(name)) folders.push_back({*step, directory / name});
  std::ranges::sort(folders, std::ranges::greater{}, &Folder::step);
  return folders;
}

fs::path temporary_path(const fs::path& directory, std::uint64_t step) {
  return marked_path(directory, step, temporary_mark);
}

fs::path replaced_path(const fs::path& directory, std::uint64_t step) {
  return marked_path(directory, step, replaced_mark);
}

std::vector<Leftover> list_leftovers(const fs::path& directory) {
  std::vector<Leftover> leftovers;
  for (const auto& name : names_in(directory))
    for (const auto mark : {temporary_mark, replaced_mark})
      if (auto leftover = leftover_of(directory, name, mark)) leftovers.push_back(std::move(*leftover));
  return leftovers;
}

}  // namespace accelmgr::checkpoint
