// The only file that uses gloo. It uses gloo's transport: connections, and messages on them that gloo's
// thread moves. It does not use gloo's collectives: these combine ranks in their own order, and they end a
// wait at its timeout by closing all connections, so that nothing tells which rank was missing.
#include "launcher/collective/gloo/plugin.hpp"

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/unbound_buffer.h>

#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace accelmgr::collective::gloo {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Buffer = ::gloo::transport::tcp::UnboundBuffer;

void fill(PluginError* error, const char* text) noexcept {
  std::strncpy(error->text, text, sizeof error->text - 1);
  error->text[sizeof error->text - 1] = '\0';
}

/// Runs `call`; when it throws, fills `error` and returns `otherwise`.
template <class Result, class Call>
Result guarded(PluginError* error, Result otherwise, Call&& call) noexcept {
  try {
    return call();
  } catch (const std::exception& caught) {
    fill(error, caught.what());
  } catch (...) {
    fill(error, "unknown exception");
  }
  return otherwise;
}

/// Waits on what gloo's thread records of a message. gloo's own waits do not fit: at their timeout they close
/// all connections. abortWaitRecv(), which ends a wait early, also ends it when the message has arrived but
/// the waiting thread has not looked yet.
class Completion final : public Buffer {
 public:
  static PluginState wait(Buffer& buffer, bool sends, Clock::time_point until) {
    const auto& completions = buffer.*(sends ? &Completion::sendCompletions_ : &Completion::recvCompletions_);
    auto& changed = buffer.*(sends ? &Completion::sendCv_ : &Completion::recvCv_);
    const auto& failure = buffer.*&Completion::ex_;
    std::unique_lock lock(buffer.*&Completion::m_);
    changed.wait_until(lock, until, [&] { return completions > 0 || failure; });
    if (completions > 0) return plugin_done;
    if (failure) std::rethrow_exception(failure);
    return plugin_pending;
  }
};

}  // namespace

extern "C" {

struct PluginMesh {
  std::shared_ptr<::gloo::transport::Device> device;
  std::shared_ptr<::gloo::transport::Context> context;
  std::vector<char> addresses{};  ///< Of as many bytes for each peer, in the order of ranks.
};

struct PluginMessage {
  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
  bool sends;
};

}  // extern "C"

namespace {

PluginMesh* create(const char* address, int rank, int size, double timeout_s, PluginError* error) noexcept {
  return guarded<PluginMesh*>(error, nullptr, [&] {
    auto device = ::gloo::transport::tcp::CreateDevice(::gloo::transport::tcp::attr(address));
    auto mesh = std::make_unique<PluginMesh>(PluginMesh{device, device->createContext(rank, size)});
    // gloo waits five times its timeout for a connection.
    mesh->context->setTimeout(std::max(milliseconds(1), milliseconds(static_cast<long>(timeout_s * 200))));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto own = mesh->context->createPair(peer)->address().bytes();
      mesh->addresses.insert(mesh->addresses.end(), own.begin(), own.end());
    }
    return mesh.release();
  });
}

const char* addresses(PluginMesh* mesh, std::size_t* bytes) noexcept {
  *bytes = mesh->addresses.size();
  return mesh->addresses.data();
}

bool connect(PluginMesh* mesh, int peer, const char* addresses, std::size_t bytes,
             PluginError* error) noexcept {
  return guarded(error, false, [&] {
    auto& context = *mesh->context;
    const auto each = bytes / static_cast<std::size_t>(context.size - 1);
    const auto place = static_cast<std::size_t>(context.rank < peer ? context.rank : context.rank - 1);
    context.getPair(peer)->connect({addresses + place * each, addresses + (place + 1) * each});
    return true;
  });
}

void close(PluginMesh* mesh) noexcept {
  PluginError ignored;
  guarded(&ignored, 0, [&] {
    for (int peer = 0; peer < mesh->context->size; ++peer)
      if (const auto& pair = mesh->context->getPair(peer)) pair->close();
    return 0;
  });
}

void free_mesh(PluginMesh* mesh) noexcept {
  close(mesh);
  delete mesh;
}

PluginMessage* begin(PluginMesh* mesh, int peer, std::uint64_t slot, void* data, std::size_t bytes,
                     bool sends, PluginError* error) noexcept {
  return guarded<PluginMessage*>(error, nullptr, [&] {
    auto message = std::make_unique<PluginMessage>(
        PluginMessage{mesh->context->createUnboundBuffer(data, bytes), sends});
    sends ? message->buffer->send(peer, slot, 0, bytes) : message->buffer->recv(peer, slot, 0, bytes);
    return message.release();
  });
}

PluginState wait(PluginMessage* message, double timeout_s, PluginError* error) noexcept {
  return guarded(error, plugin_failed, [&] {
    const auto patience =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    return Completion::wait(static_cast<Buffer&>(*message->buffer), message->sends, Clock::now() + patience);
  });
}

void free_message(PluginMessage* message) noexcept { delete message; }

constexpr Plugin entries{plugin_version, create, addresses, connect,     close,
                         free_mesh,      begin,  wait,      free_message};

/// Sockets that are closed in every forked child. A child would keep them open after this process has died,
/// so that the peers would not see its death. O_CLOEXEC helps only when the child executes another program.
class NotInherited {
 public:
  static NotInherited& sockets() {
    static auto* all = new NotInherited;  // Never freed: a fork may come at any time.
    return *all;
  }
  /// Registers and returns `fd`. -1, the result of a failed call, is returned as it is.
  int add(int fd) {
    const std::lock_guard lock(mutex_);
    if (fd >= 0) fds_.insert(fd);
    return fd;
  }
  /// Must be called before `fd` is closed: afterwards the number may name another file.
  void remove(int fd) {
    const std::lock_guard lock(mutex_);
    fds_.erase(fd);
  }

 private:
  NotInherited() {
    pthread_atfork([] { sockets().mutex_.lock(); }, [] { sockets().mutex_.unlock(); },
                   [] { sockets().close_all(); });
  }
  void close_all() {
    for (const int fd : fds_) syscall(SYS_close, fd);
    fds_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> fds_;
};

}  // namespace

// The plug-in's symbols come before all others, so gloo calls these functions instead of the C library's.

// gloo writes without MSG_NOSIGNAL, so SIGPIPE would end the process when a peer has died.
extern "C" __attribute__((visibility("default"))) ssize_t writev(int fd, const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<std::size_t>(count);
  const auto sent = sendmsg(fd, &message, MSG_NOSIGNAL);
  return sent >= 0 || errno != ENOTSOCK ? sent : syscall(SYS_writev, fd, parts, count);
}

// gloo sets SO_LINGER so that closing resets a connection. Bytes that the peer has not read by then would be
// lost, and with them the peer's last call.
extern "C" __attribute__((visibility("default"))) int setsockopt(int fd, int level, int option,
                                                                 const void* value,
                                                                 socklen_t length) noexcept {
  if (level == SOL_SOCKET && option == SO_LINGER) return 0;
  return static_cast<int>(syscall(SYS_setsockopt, fd, level, option, value, length));
}

// gloo's thread asks for the name of a peer that has connected, and throws when the peer is gone by then. The
// name occurs in messages only, so this socket's own name will do; gloo notices the end of the peer when it
// reads.
extern "C" __attribute__((visibility("default"))) int getpeername(int socket, sockaddr* name,
                                                                  socklen_t* length) noexcept {
  const auto result = static_cast<int>(syscall(SYS_getpeername, socket, name, length));
  return result == 0 || errno != ENOTCONN ? result : getsockname(socket, name, length);
}

// Forked children do not inherit gloo's sockets.
extern "C" __attribute__((visibility("default"))) int socket(int domain, int type, int protocol) noexcept {
  return NotInherited::sockets().add(
      static_cast<int>(syscall(SYS_socket, domain, type | SOCK_CLOEXEC, protocol)));
}

extern "C" __attribute__((visibility("default"))) int accept(int listener, sockaddr* name,
                                                             socklen_t* length) {
  return NotInherited::sockets().add(accept4(listener, name, length, SOCK_CLOEXEC));
}

extern "C" __attribute__((visibility("default"))) int close(int fd) {
  NotInherited::sockets().remove(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}

extern "C" __attribute__((visibility("default"))) const Plugin* accelmgr_gloo_plugin() { return &entries; }

}  // namespace accelmgr::collective::gloo
