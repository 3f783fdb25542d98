#include "ipc/memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"

#ifndef MADV_POPULATE_READ  // Linux 5.14
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace accelmgr::ipc {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::uintptr_t round_up(std::uintptr_t value, std::size_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

int protection(Access access) noexcept { return access == Access::read ? PROT_READ : PROT_READ | PROT_WRITE; }

/// Whole pages.
struct Pages {
  std::uintptr_t begin;
  std::uintptr_t end;

  static Pages around(const std::byte* p, std::size_t bytes) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    return {address / page_bytes() * page_bytes(), round_up(address + bytes, page_bytes())};
  }
};

// On kernels without the advice. Writers of other processes may be at work on the page.
void touch(Pages pages, int advice) noexcept {
  for (auto address = pages.begin; address < pages.end; address += page_bytes()) {
    auto* byte = reinterpret_cast<unsigned char*>(address);
    if (advice == MADV_POPULATE_WRITE) {
      __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
    } else {
      *static_cast<volatile const unsigned char*>(byte);
    }
  }
}

/// Returns 0 or an errno value.
int advise(Pages pages, int advice) noexcept {
  if (pages.begin >= pages.end) return 0;
  int error = EINTR;
  while (error == EINTR)
    error = madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, advice) == 0 ? 0 : errno;
  // EINVAL: the kernel does not know the advice, or the protection forbids it. An empty range tells which.
  const bool unknown_advice = error == EINVAL && madvise(nullptr, 0, advice) != 0;
  if (!unknown_advice) return error;
  touch(pages, advice);
  return 0;
}

void check_populated(int error, Pages pages) {
  if (error == 0) return;
  const auto bytes = pages.end - pages.begin;
  if (error == ENOMEM)
    throw SessionError(fmt::format("memory ran out while {} bytes of shared memory were populated", bytes));
  throw SystemError(fmt::format("madvise of {} bytes of shared memory", bytes), error);
}

}  // namespace

// A memfd without its memory would be a SIGBUS in the middle of a step.
void allocate(int memfd, std::size_t bytes, const std::string& name) {
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(memfd, 0, static_cast<off_t>(bytes));
  if (error == ENOMEM || error == ENOSPC)
    throw SessionError(fmt::format(
        "there is not enough memory for '{}': {} bytes of shared memory are needed", name, bytes));
  if (error != 0) throw SystemError(fmt::format("posix_fallocate of {} bytes for '{}'", bytes, name), error);
}

base::UniqueFd create_memfd(const std::string& name, std::size_t bytes, Allocate when) {
  base::UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw SystemError(fmt::format("memfd_create of '{}'", name), errno);
  if (when == Allocate::now) {
    allocate(fd.get(), bytes, name);
  } else if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError(fmt::format("ftruncate of '{}' to {} bytes", name, bytes), errno);
  }
  // Who maps it relies on its size: nobody it is passed to may shrink it.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError(fmt::format("sealing of '{}'", name), errno);
  return fd;
}

Mapping::Mapping(int fd, std::size_t offset, std::size_t length, Access access) {
  void* address = mmap(nullptr, length, protection(access), MAP_SHARED, fd, static_cast<off_t>(offset));
  if (address == MAP_FAILED)
    throw SystemError(fmt::format("mmap of {} bytes at offset {} of descriptor {}", length, offset, fd),
                      errno);
  data_ = static_cast<std::byte*>(address);
  size_ = length;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Mapping::~Mapping() { unmap(); }

void Mapping::unmap() noexcept {
  if (data_ != nullptr) munmap(data_, size_);
}

void Mapping::protect(Access access) {
  if (data_ != nullptr && mprotect(data_, size_, protection(access)) != 0)
    throw SystemError(fmt::format("mprotect of {} bytes", size_), errno);
}

void Mapping::keep_from_children() const {
  if (data_ != nullptr && madvise(data_, size_, MADV_DONTFORK) != 0)
    throw SystemError(fmt::format("madvise of {} bytes, to keep them from children", size_), errno);
}

void populate(std::byte* p, std::size_t bytes, int threads) {
  const auto pages = Pages::around(p, bytes);
  const auto share = round_up((pages.end - pages.begin) / static_cast<std::size_t>(std::max(threads, 1)) + 1,
                              huge_page_bytes);
  std::atomic<int> error{0};
  const auto run = [&error](Pages part) {
    if (const int failed = advise(part, MADV_POPULATE_WRITE); failed != 0) error.store(failed);
  };
  {
    std::vector<std::jthread> others;
    auto rest = pages;
    try {
      for (; rest.end - rest.begin > share; rest.begin += share)
        others.emplace_back(run, Pages{rest.begin, rest.begin + share});
    } catch (const std::system_error&) {
      // No more threads can be started: what is left is this one's.
    }
    run(rest);
  }
  check_populated(error.load(), pages);
}

void populate_read(const std::byte* p, std::size_t bytes) {
  const auto pages = Pages::around(p, bytes);
  check_populated(advise(pages, MADV_POPULATE_READ), pages);
}

}  // namespace accelmgr::ipc
