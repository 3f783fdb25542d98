// The packets between a fork server and its client. Both run the same image, so a packet is the bytes of its
// structure.
#pragma once

#include <fmt/format.h>
#include <sys/types.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "accelmgr/errors.hpp"

namespace accelmgr::ipc::fork_server {

struct Request {
  enum class Kind : int { spawn, signal, stop };
  Kind kind;
  int rank;  ///< For Kind::signal: the number of the signal.
  std::uint32_t generation;
};

struct Report {
  enum class Kind : int { started, ended };
  Kind kind;
  int rank;
  std::uint32_t generation;
  pid_t pid;
  int wait_status;
  int error;
  std::int64_t time_ns;
};

template <class Packet>
std::string_view bytes_of(const Packet& packet) noexcept {
  return {reinterpret_cast<const char*>(&packet), sizeof packet};
}

template <class Packet>
Packet packet_of(const std::string& bytes) {
  if (bytes.size() != sizeof(Packet))
    throw SessionError(fmt::format("fork server: expected a packet of {} bytes, got one of {}",
                                   sizeof(Packet), bytes.size()));
  Packet packet;
  std::memcpy(&packet, bytes.data(), sizeof packet);
  return packet;
}

/// Throws SessionError unless `ok`.
inline void check(bool ok, const char* whose, const char* field, std::int64_t value,
                  const std::string& right) {
  if (!ok)
    throw SessionError(
        fmt::format("a {} of the fork server: {} is {}; it must be {}", whose, field, value, right));
}

}  // namespace accelmgr::ipc::fork_server
