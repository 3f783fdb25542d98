#include "launcher/collective/shm/memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/ipc/cores.hpp"
#include "base/ipc/uninterrupted.hpp"
#include "launcher/collective/shm/factory.hpp"

namespace accelmgr::collective::shm {
namespace {

// Up to this size, allocations do not ask first how much memory is available.
constexpr std::uint64_t little_bytes = 128 * 1024;

void check_available(std::uint64_t bytes) {
  const auto available = ipc::memory_available();
  if (available.bytes < bytes)
    throw SessionError(fmt::format(
        "there is not enough memory for a world of ranks: {} bytes are needed, {} are available ({})", bytes,
        available.bytes, available.limited_by));
}

/// Checks a world and returns its bytes up to the data of the slots. Reads the header instead of mapping it:
/// another program's file may be shorter than a header.
std::uint64_t checked_table_bytes(int fd) {
  struct stat file {};
  if (fstat(fd, &file) != 0) throw SystemError(fmt::format("fstat of descriptor {}", fd), errno);
  const auto refuse = [fd](const std::string& why) {
    return SessionError(fmt::format("descriptor {} is not the memory of a world: {}", fd, why));
  };
  Header header{};
  if (pread(fd, static_cast<void*>(&header), sizeof header, 0) != static_cast<ssize_t>(sizeof header))
    throw refuse(fmt::format("it has {} bytes, less than a header", file.st_size));
  if (header.magic.load() != magic) throw refuse("its first bytes are not those of a world");
  if (header.layout_version != layout_version || header.fingerprint != build_fingerprint())
    throw SessionError(
        fmt::format("the world of descriptor {} was made by another build (layout {}, {:x}); this one has "
                    "layout {}, {:x}",
                    fd, header.layout_version, header.fingerprint, layout_version, build_fingerprint()));
  // Every offset and size follows from these two numbers.
  if (header.ranks < 1 || header.ranks > most_ranks || header.parks > 1)
    throw refuse(fmt::format("its header names {} ranks; 1 to {} are possible", header.ranks, most_ranks));
  Header planned{};
  plan_layout(header.ranks, header.parks == 1, planned);
  constexpr auto first = offsetof(Header, layout_version),
                 end = offsetof(Header, parks) + sizeof header.parks;
  const auto plan_of = [](const Header& of) { return reinterpret_cast<const std::byte*>(&of) + first; };
  if (std::memcmp(plan_of(header), plan_of(planned), end - first) != 0)
    throw refuse(fmt::format("its sizes and offsets are not those of a world of {} ranks", header.ranks));
  // A process that maps the world relies on its size.
  if (header.total_bytes != static_cast<std::uint64_t>(file.st_size) ||
      (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0)
    throw refuse(
        fmt::format("it has {} bytes instead of {}, or can be shrunk", file.st_size, header.total_bytes));
  return header.data;
}

}  // namespace

void allocate_range(int memfd, std::uint64_t offset, std::uint64_t bytes) {
  // When memory runs out, the kernel kills a process rather than refuse the allocation.
  if (bytes > little_bytes) check_available(bytes);
  const int error = ipc::uninterrupted(
      [&] { return posix_fallocate(memfd, static_cast<off_t>(offset), static_cast<off_t>(bytes)); });
  if (error == ENOMEM || error == ENOSPC)
    throw SessionError(
        fmt::format("there is not enough memory for a world of ranks: {} bytes are needed", bytes));
  if (error != 0)
    throw SystemError(fmt::format("posix_fallocate of {} bytes for a world of ranks", bytes), error);
}

void discard_range(int memfd, std::uint64_t offset, std::uint64_t bytes) noexcept {
  fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
}

base::UniqueFd create_world(int size, Waiting waiting) {
  if (size < 1 || size > most_ranks)
    throw UsageError(fmt::format("a world on one node has 1 to {} ranks, not {}", most_ranks, size));
  const bool parks = waiting == Waiting::parked || size > ipc::allowed_cores();
  Header plan{};
  plan_layout(static_cast<std::uint32_t>(size), parks, plan);
  // What the group of all ranks needs at once. The rest is allocated as it is used.
  check_available(plan.controls + plan.control_bytes + plan.data_bytes);
  auto fd = ipc::create_memfd("accelmgr-world", plan.total_bytes, ipc::Allocate::later);
  allocate_range(fd.get(), 0, plan.controls);
  const ipc::Mapping mapping(fd.get(), 0, sizeof(Header), ipc::Access::read_write);
  auto& header = *reinterpret_cast<Header*>(mapping.data());
  plan_layout(static_cast<std::uint32_t>(size), parks, header);
  header.magic.store(magic, std::memory_order_release);
  return fd;
}

Memory::Memory(int fd) : fd_(base::duplicate(fd)) {
  mapping_ = ipc::Mapping(fd_.get(), 0, checked_table_bytes(fd), ipc::Access::read_write);
}

}  // namespace accelmgr::collective::shm
