#include "launch/parcel.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "ipc/memory.hpp"
#include "ipc/socket.hpp"

namespace accelmgr::launch {
namespace {

// The first byte of the packet.
constexpr char within = 'w';     // The rest is the text.
constexpr char in_memory = 'm';  // It is in the memfd that comes with the packet.

/// A few of them fit into any socket's buffer.
constexpr std::size_t max_within_bytes = 16 * 1024;

}  // namespace

Parcel::Parcel(std::string text, const std::string& what) {
  if (text.size() > ipc::max_text_bytes)
    throw UsageError(fmt::format("{} takes {} bytes; at most {} can be passed between processes", what,
                                 text.size(), ipc::max_text_bytes));
  if (text.size() <= max_within_bytes) {
    packet_ = within + std::move(text);
    return;
  }
  packet_ = in_memory;
  memory_ = ipc::create_memfd("accelmgr parcel", text.size());
  const ipc::Mapping mapping(memory_.get(), 0, text.size(), ipc::Access::read_write);
  std::memcpy(mapping.data(), text.data(), text.size());
}

void Parcel::send(int socket) const {
  const int fd = memory_.get();
  ipc::send(socket, packet_, {&fd, memory_ ? 1U : 0U});
}

std::optional<std::string> receive_parcel(int socket, base::Deadline deadline) {
  auto message = ipc::receive(socket, deadline);
  if (!message) return std::nullopt;
  const char kind = message->bytes[0];
  if (kind == within && message->fds.empty()) return message->bytes.substr(1);
  struct stat status {};
  if (kind != in_memory || message->fds.size() != 1 || fstat(message->fds[0].get(), &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) > ipc::max_text_bytes)
    throw SessionError(
        fmt::format("a text was expected on socket {}, something else came ({} bytes, {} descriptors)",
                    socket, message->bytes.size(), message->fds.size()));
  const auto bytes = static_cast<std::size_t>(status.st_size);
  const ipc::Mapping mapping(message->fds[0].get(), 0, bytes, ipc::Access::read);
  return std::string(reinterpret_cast<const char*>(mapping.data()), bytes);
}

}  // namespace accelmgr::launch
