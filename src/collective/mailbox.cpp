#include "collective/mailbox.hpp"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <sstream>

#include "accelmgr/communicator.hpp"
#include "base/interruption.hpp"
#include "base/timing.hpp"
#include "ipc/network.hpp"

namespace accelmgr::collective {
namespace {

/// A numeric address and a port.
class Address {
 public:
  Address(const std::string& host, const std::string& port) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0)
      throw SessionError(
          fmt::format("'{}' with port '{}' is not an address: {}", host, port, gai_strerror(error)));
    std::copy_n(reinterpret_cast<const char*>(found->ai_addr), found->ai_addrlen,
                reinterpret_cast<char*>(&storage_));
    length_ = found->ai_addrlen;
    freeaddrinfo(found);
  }
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const noexcept { return length_; }
  OwnSocket open_socket() const {
    OwnSocket socket(::socket(storage_.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
    if (!socket) throw SystemError("socket", errno);
    return socket;
  }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

void set(int socket, int level, int option, int value) noexcept {
  setsockopt(socket, level, option, &value, sizeof value);
}

/// Makes the kernel notice within half a minute that a host has gone silent.
void keep_alive(int socket) noexcept {
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

/// Waits until any entry is ready. Returns false when the deadline passes or an interruption comes first.
bool poll_until(std::span<pollfd> entries, base::Deadline deadline) {
  for (;;) {
    const auto look = earlier(deadline, base::Deadline::in_seconds(timing::look_s));
    const timespec timeout{.tv_sec = 0, .tv_nsec = std::max<std::int64_t>(look.remaining_ns(), 0)};
    const int ready = ppoll(entries.data(), entries.size(), &timeout, nullptr);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (deadline.passed() || base::interrupted()) return false;
  }
}

bool wait_ready(int socket, short event, base::Deadline deadline) {
  pollfd entry{.fd = socket, .events = event, .revents = 0};
  return poll_until({&entry, 1}, deadline);
}

using Result = Mailbox::Result;

/// Moves all of `bytes`, with send or recv. The deadline also ends a transfer that never blocks.
template <class Move, class Byte>
Result move_all(int socket, std::span<Byte> bytes, short event, base::Deadline deadline, Move move) {
  auto look = base::Deadline::in_seconds(timing::look_s);
  while (!bytes.empty()) {
    if (look.passed()) {
      if (deadline.passed() || base::interrupted()) return Result::timeout;
      look = base::Deadline::in_seconds(timing::look_s);
    }
    const auto moved = move(socket, bytes.data(), bytes.size());
    if (moved > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(moved));
      continue;
    }
    if (moved == 0) return Result::lost;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Result::lost;
    if (!wait_ready(socket, event, deadline)) return Result::timeout;
  }
  return Result::done;
}

Result write_all(int socket, std::string_view bytes, base::Deadline deadline) {
  return move_all(socket, std::span(bytes), POLLOUT, deadline,
                  [](int fd, const char* data, std::size_t n) { return ::send(fd, data, n, MSG_NOSIGNAL); });
}

Result read_all(int socket, std::span<char> bytes, base::Deadline deadline) {
  return move_all(socket, bytes, POLLIN, deadline,
                  [](int fd, char* data, std::size_t n) { return ::recv(fd, data, n, 0); });
}

/// Waits until the peer's kernel has acknowledged all that was written.
Result wait_acknowledged(int socket, base::Deadline deadline) {
  for (;;) {
    int bytes = 0;
    if (ioctl(socket, SIOCOUTQ, &bytes) != 0) return Result::lost;
    if (bytes == 0) return Result::done;
    if (wait_ready(socket, 0, earlier(deadline, base::Deadline::in_seconds(timing::short_look_s))))
      return Result::lost;
    if (deadline.passed() || base::interrupted()) return Result::timeout;
  }
}

template <class Plain>
std::string_view bytes_of(const Plain& plain) noexcept {
  return {reinterpret_cast<const char*>(&plain), sizeof plain};
}
template <class Plain>
std::span<char> bytes_of(Plain& plain) noexcept {
  return {reinterpret_cast<char*>(&plain), sizeof plain};
}

}  // namespace

Mailbox::Mailbox(SharedStore& store, std::string name, int rank, const std::string& address)
    : store_(store), name_(std::move(name)), rank_(rank) {
  const Address any_port(address, "0");
  listener_ = any_port.open_socket();
  if (const int error = ipc::bind_and_listen(listener_.get(), any_port.get(), any_port.length()); error != 0)
    throw SystemError(fmt::format("listening at {}", address), error);
  if (getrandom(&token_, sizeof token_, 0) != sizeof token_) throw SystemError("getrandom", errno);
  store_.set(fmt::format("{}/{}", name_, rank_),
             fmt::format("{} {} {}", address, ipc::bound_port(listener_.get()), token_));
}

Result Mailbox::connect(int to, bool sends, base::Deadline deadline, OwnSocket& socket) {
  std::string text;
  try {
    text = store_.get(fmt::format("{}/{}", name_, to), deadline);
  } catch (const CollectiveError&) {
    return Result::timeout;
  }
  std::istringstream words(text);
  std::string host;
  std::string port;
  Hello hello{.token = 0, .rank = rank_, .sends = sends};
  words >> host >> port >> hello.token;
  const Address address(host, port);
  socket = address.open_socket();
  keep_alive(socket.get());
  if (::connect(socket.get(), address.get(), address.length()) != 0 && errno != EINPROGRESS)
    return Result::lost;
  if (!wait_ready(socket.get(), POLLOUT, deadline)) return Result::timeout;
  return write_all(socket.get(), bytes_of(std::as_const(hello)), deadline);
}

Result Mailbox::send(std::string_view object, int to, base::Deadline deadline) {
  auto& socket = outgoing_[to];
  if (!socket) {
    if (const auto result = connect(to, true, deadline, socket); result != Result::done) return result;
    // The receiver's kernel must know this connection even if this process ends now. The receiver reads a
    // connection to its end, but counts a sender that is gone without a connection as lost.
    if (const auto result = wait_acknowledged(socket.get(), deadline); result != Result::done) return result;
  }
  const std::uint64_t length = object.size();
  if (const auto result = write_all(socket.get(), bytes_of(length), deadline); result != Result::done)
    return result;
  return write_all(socket.get(), object, deadline);
}

// A connection without the right token is closed. A peer that sends no hello is waited for only for
// greeting_s.
void Mailbox::accept_one(base::Deadline deadline) {
  OwnSocket socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    // The connection stays in the queue for a later call. All other errors mean that the peer has gone again.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      throw SystemError("accepting a connection", errno);
    return;
  }
  Hello hello{};
  if (read_all(socket.get(), bytes_of(hello),
               earlier(deadline, base::Deadline::in_seconds(timing::greeting_s))) != Result::done)
    return;
  if (hello.token != token_) return;
  keep_alive(socket.get());
  if (hello.sends != 0)
    incoming_[hello.rank] = {std::move(socket), std::nullopt};
  else
    watchers_.push_back(std::move(socket));
}

// A sender's connection arrives before the end of the watched one. So once the end is seen, only connections
// that are already in the queue count, and nothing more is waited for.
Result Mailbox::wait_for_connection(int from, base::Deadline deadline) {
  auto& watched = watched_[from];
  if (!watched) {
    const auto result = connect(from, false, deadline, watched);
    if (result == Result::timeout) return result;
    if (result == Result::lost) watched = {};
  }
  while (!incoming_.contains(from)) {
    std::array<pollfd, 2> entries{
        pollfd{.fd = listener_.get(), .events = POLLIN, .revents = 0},
        pollfd{.fd = watched.get(), .events = POLLIN, .revents = 0},
    };
    const bool ready = poll_until(entries, watched ? deadline : base::Deadline::at_ns(0));
    if (entries[0].revents == 0) return !ready && watched ? Result::timeout : Result::lost;
    accept_one(deadline);
    if (deadline.passed() && !incoming_.contains(from)) return Result::timeout;
  }
  return Result::done;
}

Result Mailbox::receive(std::string& object, int from, base::Deadline deadline) {
  if (!incoming_.contains(from))
    if (const auto result = wait_for_connection(from, deadline); result != Result::done) return result;
  auto& [socket, length] = incoming_[from];
  if (!length) {
    std::uint64_t announced = 0;
    if (const auto result = read_all(socket.get(), bytes_of(announced), deadline); result != Result::done)
      return result;
    length = announced;
  }
  object.resize(*length);
  length.reset();
  return read_all(socket.get(), object, deadline);
}

}  // namespace accelmgr::collective
