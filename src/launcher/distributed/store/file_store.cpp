#include "launcher/distributed/store/file_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "base/interruption.hpp"
#include "base/timing.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::distributed {
namespace {

constexpr off_t users = 0, writer = 1;  // The bytes that are locked.
constexpr std::uint64_t records_offset = sizeof(std::uint64_t);

// Polls with growing pauses, because NFS does not notify of another node's writes.
class Pause {
 public:
  /// False if the deadline has passed or the wait was interrupted.
  bool operator()(base::Deadline deadline) {
    if (deadline.passed() || base::interrupted()) return false;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(pause_ns_, deadline.remaining_ns())));
    pause_ns_ = std::min<std::int64_t>(2 * pause_ns_, timing::look_ns);
    return true;
  }

 private:
  std::int64_t pause_ns_ = 500'000;
};

// Locks the open file description, not the process, so that two stores of one process exclude each other too.
bool try_lock(int fd, off_t byte, short type) noexcept {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw SessionError(fmt::format("file://{}: {}", path, what));
}

/// Calls pread() or pwrite() until all bytes are read or written, as `verb` says.
template <class Call, class Byte>
void transfer(Call call, const char* verb, int fd, Byte* data, std::size_t bytes, std::uint64_t offset,
              const std::string& path) {
  for (std::size_t at = 0; at < bytes;) {
    const auto done = call(fd, data + at, bytes - at, static_cast<off_t>(offset + at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(path, fmt::format("cannot be {}: {}", verb, std::strerror(errno)));
    if (done == 0) fail(path, "is not a store of accelmgr, or another process truncated it");
    at += static_cast<std::size_t>(done);
  }
}

void write_at(int fd, const void* data, std::size_t bytes, std::uint64_t offset, const std::string& path) {
  transfer(pwrite, "written", fd, static_cast<const char*>(data), bytes, offset, path);
}

void read_at(int fd, void* data, std::size_t bytes, std::uint64_t offset, const std::string& path) {
  transfer(pread, "read", fd, static_cast<char*>(data), bytes, offset, path);
}

}  // namespace

class FileStore::Writing : base::Unmovable {
 public:
  explicit Writing(const FileStore& store) : fd_(store.fd_.get()) {
    Pause pause;
    const auto deadline = base::Deadline::in_seconds(timing::file_lock_s);
    while (!try_lock(fd_, writer, F_WRLCK))
      if (!pause(deadline))
        fail(store.path_, fmt::format("another process has it locked for {} s", timing::file_lock_s));
  }
  ~Writing() { try_lock(fd_, writer, F_UNLCK); }

 private:
  int fd_;
};

FileStore::FileStore(std::string path, base::Deadline deadline) : path_(std::move(path)) {
  while (!open_shared(deadline)) {
  }
}

// Gives its own lock back first: otherwise two stores that end at the same time would each find the other's
// lock, and the file would stay.
FileStore::~FileStore() {
  try_lock(fd_.get(), users, F_UNLCK);
  if (try_lock(fd_.get(), users, F_WRLCK)) ::unlink(path_.c_str());
}

bool FileStore::open_shared(base::Deadline deadline) {
  fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd_) fail(path_, fmt::format("cannot be opened: {}", std::strerror(errno)));
  if (try_lock(fd_.get(), users, F_WRLCK)) {
    // An earlier run left the content. No other store writes before it has the shared lock.
    const std::uint64_t nothing = 0;
    if (ftruncate(fd_.get(), 0) != 0) fail(path_, fmt::format("cannot be emptied: {}", std::strerror(errno)));
    write_at(fd_.get(), &nothing, sizeof(nothing), 0, path_);
  }
  Pause pause;
  while (!try_lock(fd_.get(), users, F_RDLCK))
    if (!pause(deadline)) fail(path_, "another process has it locked");
  struct stat ours {
  }, named{};
  return fstat(fd_.get(), &ours) == 0 && stat(path_.c_str(), &named) == 0 && ours.st_ino == named.st_ino &&
         ours.st_dev == named.st_dev;
}

void FileStore::read_new() {
  std::uint64_t committed = 0;
  read_at(fd_.get(), &committed, sizeof(committed), 0, path_);
  while (seen_ < committed) {
    std::uint32_t lengths[2];
    read_at(fd_.get(), lengths, sizeof(lengths), records_offset + seen_, path_);
    const auto bytes = sizeof(lengths) + std::uint64_t{lengths[0]} + lengths[1];
    if (bytes > committed - seen_) fail(path_, "is not a store of accelmgr");
    std::string key(lengths[0], '\0'), value(lengths[1], '\0');
    read_at(fd_.get(), key.data(), key.size(), records_offset + seen_ + sizeof(lengths), path_);
    read_at(fd_.get(), value.data(), value.size(), records_offset + seen_ + sizeof(lengths) + key.size(),
            path_);
    values_.insert_or_assign(std::move(key), std::move(value));
    seen_ += bytes;
  }
}

void FileStore::append(const std::string& key, const std::string& value) {
  const std::uint32_t lengths[2]{static_cast<std::uint32_t>(key.size()),
                                 static_cast<std::uint32_t>(value.size())};
  std::string record(reinterpret_cast<const char*>(lengths), sizeof(lengths));
  record += key;
  record += value;
  write_at(fd_.get(), record.data(), record.size(), records_offset + seen_, path_);
  const std::uint64_t committed = seen_ + record.size();
  write_at(fd_.get(), &committed, sizeof(committed), 0, path_);
}

void FileStore::set(const std::string& key, const std::string& value) {
  const Writing writing(*this);
  read_new();
  append(key, value);
}

std::string FileStore::get(const std::string& key, base::Deadline deadline) {
  for (Pause pause;;) {
    if (has(key)) return values_.at(key);
    if (!pause(deadline))
      throw CollectiveError(fmt::format("file://{}: no rank has set '{}' by the deadline", path_, key),
                            CollectiveError::Cause::timeout, {});
  }
}

bool FileStore::has(const std::string& key) {
  read_new();
  return values_.contains(key);
}

std::int64_t FileStore::add(const std::string& key, std::int64_t amount) {
  const Writing writing(*this);
  read_new();
  const auto found = values_.find(key);
  const auto sum = (found == values_.end() ? 0 : std::stoll(found->second)) + amount;
  append(key, std::to_string(sum));
  return sum;
}

}  // namespace accelmgr::distributed
