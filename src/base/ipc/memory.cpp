#include "base/ipc/memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/uninterrupted.hpp"

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

/// A range of whole pages.
struct Pages {
  std::uintptr_t begin;
  std::uintptr_t end;

  static Pages around(const std::byte* p, std::size_t bytes) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    return {address / page_bytes() * page_bytes(), round_up(address + bytes, page_bytes())};
  }
};

// For kernels without the advice. Other processes may write to the page meanwhile, so a write must not change
// it: it is an atomic OR with 0.
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
  const int error = uninterrupted([&] {
    const auto bytes = pages.end - pages.begin;
    return madvise(reinterpret_cast<void*>(pages.begin), bytes, advice) == 0 ? 0 : errno;
  });
  // EINVAL: the kernel does not know the advice, or the protection forbids it. A call for an empty range,
  // which succeeds if the advice is known, tells which.
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

// Allocating here reports a lack of memory now, instead of a SIGBUS in the middle of a step.
void allocate(int memfd, std::size_t offset, std::size_t bytes, const std::string& name) {
  const int error = uninterrupted(
      [&] { return posix_fallocate(memfd, static_cast<off_t>(offset), static_cast<off_t>(bytes)); });
  if (error == ENOMEM || error == ENOSPC)
    throw SessionError(fmt::format(
        "there is not enough memory for '{}': {} bytes of shared memory are needed", name, bytes));
  if (error != 0) throw SystemError(fmt::format("posix_fallocate of {} bytes for '{}'", bytes, name), error);
}

base::UniqueFd create_memfd(const std::string& name, std::size_t bytes, Allocate when) {
  base::UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw SystemError(fmt::format("memfd_create of '{}'", name), errno);
  if (when == Allocate::now) {
    allocate(fd.get(), 0, bytes, name);
  } else if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError(fmt::format("ftruncate of '{}' to {} bytes", name, bytes), errno);
  }
  // The kernel gives a memfd to all users. One that gets a descriptor for reading alone could open
  // /proc/self/fd/N for writing.
  if (fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0) throw SystemError(fmt::format("fchmod of '{}'", name), errno);
  // A process that maps the memfd relies on its size, so no process may change it.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError(fmt::format("sealing of '{}'", name), errno);
  return fd;
}

base::UniqueFd open_read_only(int memfd) {
  base::UniqueFd fd(open(fmt::format("/proc/self/fd/{}", memfd).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw SystemError(fmt::format("opening memfd {} for reading", memfd), errno);
  return fd;
}

std::size_t sealed_bytes(int fd, const std::string& what) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat status {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &status) != 0)
    throw SessionError(fmt::format(
        "descriptor {} was passed as {}; it must be a memfd that is sealed against shrinking", fd, what));
  return static_cast<std::size_t>(status.st_size);
}

Mapping::Mapping(int fd, std::size_t offset, std::size_t length, Access access) {
  namespace bip = boost::interprocess;
  struct Descriptor {
    int fd;
    bip::mapping_handle_t get_mapping_handle() const { return {.handle = fd, .is_xsi = false}; }
  };
  try {
    region_ = bip::mapped_region(Descriptor{fd}, access == Access::read ? bip::read_only : bip::read_write,
                                 static_cast<bip::offset_t>(offset), length);
  } catch (const bip::interprocess_exception& error) {
    throw SystemError(fmt::format("mapping {} bytes at offset {} of descriptor {}", length, offset, fd),
                      error.get_native_error());
  }
}

namespace {

/// Asked because the kernel promises memory that it does not have, and kills processes later.
bool is_available(std::size_t bytes) noexcept try {
  return bytes <= memory_available().bytes;
} catch (const std::exception&) {
  return false;
}

}  // namespace

bool Mapping::make_private(std::size_t bytes) const noexcept {
  void* copy = is_available(bytes)
                   ? mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                   : MAP_FAILED;
  if (copy != MAP_FAILED) {
    std::memcpy(copy, data(), bytes);
    // Replaces the old mapping in one system call, so that other threads always find memory there.
    if (mremap(copy, size(), size(), MREMAP_MAYMOVE | MREMAP_FIXED, data()) != MAP_FAILED) return true;
    munmap(copy, size());
  }
  return mprotect(data(), size(), PROT_READ) == 0;
}

bool Mapping::forget() const noexcept {
  return mmap(data(), size(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

void Mapping::keep_from_children() const {
  if (*this && madvise(data(), size(), MADV_DONTFORK) != 0)
    throw SystemError(fmt::format("madvise of {} bytes, so that children do not inherit them", size()),
                      errno);
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
      // No more threads can be started: the calling thread does the rest.
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
