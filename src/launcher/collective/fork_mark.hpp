// Tells whether this process made an object or inherited it by fork(). The mark is a page that the kernel
// wipes in every forked child: reading memory is cheap enough for every call, getpid() is not.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "base/unmovable.hpp"

namespace accelmgr::collective {

class ForkMark : base::Unmovable {
 public:
  ForkMark() noexcept {
    void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, bytes, MADV_WIPEONFORK) != 0) {
      munmap(page, bytes);
      return;
    }
    mark_ = static_cast<volatile int*>(page);
    *mark_ = 1;
  }
  ~ForkMark() {
    if (mark_ != nullptr) munmap(const_cast<int*>(mark_), bytes);
  }

  bool inherited() const noexcept { return mark_ != nullptr ? *mark_ == 0 : getpid() != pid_; }

 private:
  static constexpr std::size_t bytes = 4096;  // The kernel rounds up to its pages.
  volatile int* mark_ = nullptr;
  pid_t pid_ = getpid();  ///< Used where the kernel cannot wipe a page at fork().
};

}  // namespace accelmgr::collective
