#include "engine/checkpoint/lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/clock.hpp"
#include "base/ipc/network.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/user_forks.hpp"
#include "base/timing.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::chrono::milliseconds look{10};
// The text never gets shorter, and a write within one page is whole even if this process is killed in it.
constexpr std::size_t text_bytes = 512;

struct Holder {
  pid_t pid = 0;  ///< 0: the file does not say.
  std::string host;
  std::string run;
};

Holder read_holder(int fd) {
  char text[text_bytes];
  const auto bytes = pread(fd, text, sizeof text, 0);
  if (bytes <= 0) return {};
  const auto found = json::parse(text, text + bytes, nullptr, /*allow_exceptions=*/false);
  try {
    return {found.at("pid"), found.at("host"), found.at("run")};
  } catch (const json::exception&) {
    return {};
  }
}

/// False for a process of another machine: it cannot be examined from here.
bool has_ended(const Holder& holder) {
  if (holder.pid <= 0) return true;
  return holder.host == ipc::host_name() && checkpoint::has_ended(holder.pid);
}

std::string describe(const Holder& holder) {
  if (holder.pid <= 0) return "another process";
  if (holder.host != ipc::host_name()) return fmt::format("process {} of node {}", holder.pid, holder.host);
  if (holder.pid == getpid()) return "another manager of this process, which was not stopped";
  return has_ended(holder) ? fmt::format("a process that process {} has left behind", holder.pid)
                           : fmt::format("process {}", holder.pid);
}

bool names_file(const fs::path& path, int fd) {
  struct stat named, opened;
  return stat(path.c_str(), &named) == 0 && fstat(fd, &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

base::UniqueFd open_lock_file(const fs::path& path) {
  base::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd) throw SystemError(fmt::format("making '{}'", path.string()), errno);
  return fd;
}

/// Runs `call`. A SystemError becomes a CheckpointError that says why `directory` cannot be written.
template <typename Call>
void for_writing(const fs::path& directory, Call&& call) {
  try {
    call();
  } catch (const SystemError& error) {
    throw CheckpointError(
        fmt::format("checkpoints cannot be written to '{}': {}", directory.string(), error.what()));
  }
}

}  // namespace

bool has_ended(pid_t pid, std::optional<std::uint64_t> began) try {
  if (ipc::has_ended(ipc::open_pidfd(pid).get())) return true;
  const auto now = ipc::began_at(pid);
  return began && now && *began != *now;
} catch (const SystemError& error) {
  return error.code() == ESRCH;
}

DirectoryLock::DirectoryLock(const fs::path& directory) : owner_(getpid()) {
  for_writing(directory, [&] {
    make_directories(directory);
    path_ = fs::absolute(directory) / ".lock";
    const auto deadline = base::Deadline::in_seconds(timing::last_writer_ends_s);
    while (!try_to_lock()) {
      const auto holder = read_holder(fd_.get());
      if (!has_ended(holder) || deadline.passed())
        throw CheckpointError(
            fmt::format("'{}' is in use by {}: only one run at a time may write checkpoints to a directory. "
                        "Use another directory, or wait until that process has ended",
                        directory.string(), describe(holder)));
      std::this_thread::sleep_for(look);
    }
    killed_run_ = read_holder(fd_.get()).run;
    try {
      write(killed_run_);
    } catch (const SystemError&) {
      unlink(path_.c_str());
      throw;
    }
  });
  ipc::close_in_forks(fd_.get());
}

// When this file is locked, its name may belong to another file: the last holder has removed this one.
bool DirectoryLock::try_to_lock() {
  for (;;) {
    fd_ = open_lock_file(path_);
    if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) return false;
      throw SystemError(fmt::format("locking '{}'", path_.string()), errno);
    }
    if (names_file(path_, fd_.get())) return true;
  }
}

DirectoryLock::~DirectoryLock() {
  if (getpid() != owner_) {
    fd_.release();  // Closed when this process was forked. The number may be another file's.
    return;
  }
  ipc::keep_in_forks(fd_.get());
  if (names_file(path_, fd_.get())) unlink(path_.c_str());
  flock(fd_.get(), LOCK_UN);  // Explicit, because the manager may have a duplicate of the descriptor.
}

bool DirectoryLock::is_held() const noexcept { return names_file(path_, fd_.get()); }

void DirectoryLock::set_run(const std::string& id) {
  for_writing(path_.parent_path(), [&] { write(id); });
}

void DirectoryLock::write(const std::string& run) const {
  auto text = base::json_text({{"host", ipc::host_name()}, {"pid", owner_}, {"run", run}});
  text.resize(text_bytes - 1, ' ');
  text += '\n';
  if (pwrite(fd_.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    throw SystemError(fmt::format("writing '{}'", path_.string()), errno);
}

}  // namespace accelmgr::checkpoint
