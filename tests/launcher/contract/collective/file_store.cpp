#include "file_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::collective::contract {
namespace {

std::string file_name_of(const std::string& key) {
  std::string name = "key_";
  for (const unsigned char c : key) name += fmt::format("{:02x}", c);
  return name;
}

std::optional<std::string> contents_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// Replaces the whole file at once, because readers take no lock.
void replace_contents(const std::filesystem::path& path, const std::string& value) {
  // mkostemp() finds a name that is free: ranks in two pid namespaces may have the same pid.
  auto draft = (path.parent_path() / "draft_XXXXXX").string();
  const base::UniqueFd made(mkostemp(draft.data(), O_CLOEXEC));
  std::ofstream(draft, std::ios::binary) << value;
  std::filesystem::rename(draft, path);
}

/// A descriptor that is readable when a key has been set in the folder.
base::UniqueFd watch(const std::filesystem::path& folder) {
  base::UniqueFd changes(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!changes || inotify_add_watch(changes.get(), folder.c_str(), IN_MOVED_TO) < 0)
    throw SessionError(fmt::format("store {}: cannot be watched", folder.string()));
  return changes;
}

void wait_change(int changes, base::Deadline deadline) {
  pollfd poll_of{changes, POLLIN, 0};
  poll(&poll_of, 1,
       static_cast<int>(std::clamp<std::int64_t>(deadline.remaining_ns() / 1'000'000 + 1, 0, 1000)));
  alignas(inotify_event) char events[4096];
  while (read(changes, events, sizeof events) > 0) {
  }
}

}  // namespace

std::filesystem::path FileStore::path_of(const std::string& key) const { return folder_ / file_name_of(key); }

void FileStore::set(const std::string& key, const std::string& value) {
  replace_contents(path_of(key), value);
}

std::string FileStore::get(const std::string& key, base::Deadline deadline) {
  const auto changes = watch(folder_);
  for (;;) {
    if (auto value = contents_of(path_of(key))) return std::move(*value);
    if (deadline.passed())
      throw CollectiveError(fmt::format("store {}: no rank has set {}", folder_.string(), key),
                            CollectiveError::Cause::timeout, {});
    wait_change(changes.get(), deadline);
  }
}

bool FileStore::has(const std::string& key) { return std::filesystem::exists(path_of(key)); }

std::int64_t FileStore::add(const std::string& key, std::int64_t amount) {
  const base::UniqueFd lock(open((folder_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock || flock(lock.get(), LOCK_EX) != 0)
    throw SessionError(fmt::format("store {}: cannot be locked", folder_.string()));
  const auto sum = std::stoll(contents_of(path_of(key)).value_or("0")) + amount;
  replace_contents(path_of(key), std::to_string(sum));
  return sum;
}

}  // namespace accelmgr::collective::contract
