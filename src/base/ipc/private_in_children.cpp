#include "base/ipc/private_in_children.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <map>
#include <mutex>
#include <utility>

namespace accelmgr::ipc {
namespace {

struct Shared {
  std::byte* data;
  std::size_t bytes;
  int fd;
};

class Registry {
 public:
  static Registry& instance() {
    static auto* const registry = new Registry;  // Never deleted: a process may fork while it ends.
    return *registry;
  }

  std::uint64_t add(const Shared& shared) {
    const std::lock_guard lock(mutex_);
    shared_.emplace(++last_, shared);
    return last_;
  }
  void remove(std::uint64_t number) noexcept {
    const std::lock_guard lock(mutex_);
    shared_.erase(number);
  }

 private:
  Registry() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().make_private();
                     instance().mutex_.unlock();
                   });
  }

  // Children of the child have copies of its pages, as of all private memory.
  void make_private() noexcept {
    for (const auto& [number, shared] : shared_)
      if (mmap(shared.data, shared.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
               shared.fd, 0) == MAP_FAILED)
        mprotect(shared.data, shared.bytes, PROT_READ);
    shared_.clear();
  }

  std::mutex mutex_;
  std::map<std::uint64_t, Shared> shared_;
  std::uint64_t last_ = 0;
};

}  // namespace

PrivateInChildren::PrivateInChildren(const Mapping& mapping, int fd)
    : number_(Registry::instance().add({mapping.data(), mapping.size(), fd})) {}

PrivateInChildren::PrivateInChildren(PrivateInChildren&& other) noexcept
    : number_(std::exchange(other.number_, 0)) {}

PrivateInChildren& PrivateInChildren::operator=(PrivateInChildren&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

void PrivateInChildren::reset() noexcept {
  if (number_ != 0) Registry::instance().remove(std::exchange(number_, 0));
}

}  // namespace accelmgr::ipc
