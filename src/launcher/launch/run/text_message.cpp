#include "launcher/launch/run/text_message.hpp"

#include <fmt/format.h>

#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/socket.hpp"

namespace accelmgr::launch {
namespace {

// The first byte of the packet.
constexpr char within = 'w';     // The rest is the text.
constexpr char in_memory = 'm';  // The text is in the memfd that comes with the packet.

/// Small enough that several packets fit into the buffer of any socket.
constexpr std::size_t max_within_bytes = 16 * 1024;

}  // namespace

TextMessage::TextMessage(std::string text, const std::string& what) {
  if (text.size() > ipc::max_text_bytes)
    throw UsageError(fmt::format("{} takes {} bytes; at most {} can be passed between processes", what,
                                 text.size(), ipc::max_text_bytes));
  if (text.size() <= max_within_bytes) {
    packet_ = within + std::move(text);
    return;
  }
  packet_ = in_memory;
  memory_ = ipc::create_memfd("accelmgr text message", text.size());
  const ipc::Mapping mapping(memory_.get(), 0, text.size(), ipc::Access::read_write);
  std::memcpy(mapping.data(), text.data(), text.size());
}

void TextMessage::send(int socket) const {
  const int fd = memory_.get();
  ipc::send(socket, packet_, {&fd, memory_ ? 1U : 0U});
}

std::optional<std::string> receive_text_message(int socket, base::Deadline deadline) {
  auto message = ipc::receive(socket, deadline);
  if (!message) return std::nullopt;
  const char kind = message->bytes[0];
  if (kind == within && message->fds.empty()) return message->bytes.substr(1);
  if (kind != in_memory || message->fds.size() != 1)
    throw SessionError(
        fmt::format("expected a text message on socket {}, got {} bytes and {} descriptors that are not one",
                    socket, message->bytes.size(), message->fds.size()));
  const auto bytes = ipc::sealed_bytes(message->fds[0].get(), "the memory of a text message");
  if (bytes == 0 || bytes > ipc::max_text_bytes)
    throw SessionError(
        fmt::format("the memory of a text message on socket {} has {} bytes; it must have 1 to {}", socket,
                    bytes, ipc::max_text_bytes));
  const ipc::Mapping mapping(message->fds[0].get(), 0, bytes, ipc::Access::read);
  return std::string(reinterpret_cast<const char*>(mapping.data()), bytes);
}

}  // namespace accelmgr::launch
