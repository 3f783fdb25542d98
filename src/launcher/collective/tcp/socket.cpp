#include "launcher/collective/tcp/socket.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/ipc/tcp.hpp"
#include "base/ipc/wait_ready.hpp"

namespace accelmgr::collective::tcp {
namespace {

/// The descriptors of all sockets of this process. A forked child closes them and begins with none.
struct Registry {
  static Registry& all() {
    static auto* registry = new Registry;  // Never freed: a fork may come at any time.
    return *registry;
  }
  Registry() {
    pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                   [] {
                     for (const int fd : all().fds) ::close(fd);
                     all().fds.clear();
                     all().mutex.unlock();
                   });
  }
  std::mutex mutex;
  std::set<int> fds;
};

void send_at_once(int fd) noexcept {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// `moved` is what send() or recv() returned.
std::optional<std::size_t> result_of(ssize_t moved) noexcept {
  if (moved >= 0) return static_cast<std::size_t>(moved);
  if (errno == EAGAIN || errno == EINTR) return 0;
  return std::nullopt;
}

}  // namespace

// A fork waits until the socket is registered.
template <class Open>
Socket Socket::opened_by(Open&& open) noexcept {
  auto& registry = Registry::all();
  const std::lock_guard lock(registry.mutex);
  Socket socket;
  socket.fd_ = open();
  if (socket.fd_ >= 0) registry.fds.insert(socket.fd_);
  return socket;
}

Socket::~Socket() {
  if (fd_ < 0) return;
  auto& registry = Registry::all();
  const std::lock_guard lock(registry.mutex);
  if (registry.fds.erase(fd_) > 0) ::close(fd_);  // In a forked child the number may name another file.
}

Socket Socket::listening(const std::string& address) {
  auto fd = ipc::bind_tcp(address, 0);
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  return opened_by([&] { return fd.release(); });
}

std::string Socket::name() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw SystemError("getsockname", errno);
  return {reinterpret_cast<const char*>(&address), length};
}

Socket Socket::connected(const std::string& name, base::Deadline deadline) {
  sockaddr_storage address{};
  name.copy(reinterpret_cast<char*>(&address), sizeof address);
  auto socket =
      opened_by([&] { return ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!socket) throw SystemError("socket", errno);
  int code = 0;
  if (::connect(socket.fd_, reinterpret_cast<const sockaddr*>(&address),
                static_cast<socklen_t>(name.size())) != 0)
    code = errno;
  if (code == EINPROGRESS) {
    code = ETIMEDOUT;
    socklen_t length = sizeof code;
    if (ipc::wait_ready(socket.fd_, POLLOUT, deadline) != 0)
      getsockopt(socket.fd_, SOL_SOCKET, SO_ERROR, &code, &length);
  }
  if (code != 0) throw SystemError("connect", code);
  send_at_once(socket.fd_);
  return socket;
}

Socket Socket::accept() const {
  auto socket = opened_by([this] { return accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
  if (!socket && errno != EAGAIN && base::is_shortage(errno)) throw SystemError("accept", errno);
  if (socket) send_at_once(socket.fd_);
  return socket;
}

std::optional<std::size_t> Socket::send(const void* data, std::size_t bytes) const noexcept {
  return result_of(::send(fd_, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT));
}

std::optional<std::size_t> Socket::receive(void* data, std::size_t bytes) const noexcept {
  const auto received = ::recv(fd_, data, bytes, MSG_DONTWAIT);
  if (received == 0 && bytes > 0) return std::nullopt;
  return result_of(received);
}

}  // namespace accelmgr::collective::tcp
