// The Torch that tests use without libtorch. Its store behaves like TCPStore, with another wire format; it
// has no devices. The server has one thread for each client.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "launcher/distributed/store/torch.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;

enum class Request : std::uint8_t { set, get, has, add, keys, erase };

void write_all(int fd, const void* data, std::size_t size) {
  for (const auto* at = static_cast<const char*>(data); size > 0;) {
    const auto sent = send(fd, at, size, MSG_NOSIGNAL);
    if (sent <= 0) throw std::runtime_error("the connection has ended");
    at += sent;
    size -= static_cast<std::size_t>(sent);
  }
}

void read_all(int fd, void* data, std::size_t size) {
  for (auto* at = static_cast<char*>(data); size > 0;) {
    const auto got = recv(fd, at, size, 0);
    if (got <= 0) throw std::runtime_error("the connection has ended");
    at += got;
    size -= static_cast<std::size_t>(got);
  }
}

template <class Number>
void write_number(int fd, Number number) {
  write_all(fd, &number, sizeof number);
}
template <class Number>
Number read_number(int fd) {
  Number number;
  read_all(fd, &number, sizeof number);
  return number;
}

void write_text(int fd, const std::string& text) {
  write_number(fd, text.size());
  write_all(fd, text.data(), text.size());
}
std::string read_text(int fd) {
  std::string text(read_number<std::size_t>(fd), '\0');
  read_all(fd, text.data(), text.size());
  return text;
}

class Server {
 public:
  explicit Server(int listening_fd) : listener_(listening_fd), accepting_([this] { accept_all(); }) {}
  ~Server() {
    ends_ = true;
    shutdown(listener_.get(), SHUT_RDWR);
    accepting_.join();
    {
      const std::lock_guard lock(mutex_);
      for (const auto& client : clients_) shutdown(client.get(), SHUT_RDWR);
    }
    changed_.notify_all();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return serving_ == 0; });
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

 private:
  void accept_all() {
    for (;;) {
      base::UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!client) return;
      const std::lock_guard lock(mutex_);
      ++serving_;
      // Detached: a process may exit while its server still runs.
      std::thread([this, fd = client.get()] { serve(fd); }).detach();
      clients_.push_back(std::move(client));
    }
  }

  void serve(int fd) {
    try {
      for (;;) {
        const auto request = read_number<Request>(fd);
        answer(fd, request, read_text(fd));
      }
    } catch (const std::runtime_error&) {
      shutdown(fd, SHUT_RDWR);
    }
    const std::lock_guard lock(mutex_);
    --serving_;
    changed_.notify_all();
  }

  void answer(int fd, Request request, const std::string& key) {
    switch (request) {
      case Request::set: {
        auto value = read_text(fd);
        const std::lock_guard lock(mutex_);
        values_[key] = std::move(value);
        break;
      }
      case Request::get: {
        const milliseconds patience(read_number<std::int64_t>(fd));
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, patience, [&] { return ends_ || values_.contains(key); });
        const bool found = values_.contains(key);
        write_number(fd, found);
        if (found) write_text(fd, values_[key]);
        return;
      }
      case Request::has: {
        const std::lock_guard lock(mutex_);
        return write_number(fd, values_.contains(key));
      }
      case Request::add: {
        const auto amount = read_number<std::int64_t>(fd);
        const std::lock_guard lock(mutex_);
        auto& value = values_[key];
        const auto sum = (value.empty() ? 0 : std::stoll(value)) + amount;
        value = std::to_string(sum);
        write_number<std::int64_t>(fd, sum);
        break;
      }
      case Request::keys: {
        const std::lock_guard lock(mutex_);
        write_number(fd, values_.size());
        for (const auto& [known, value] : values_) write_text(fd, known);
        return;
      }
      case Request::erase: {
        const std::lock_guard lock(mutex_);
        write_number(fd, values_.erase(key));
      }
    }
    changed_.notify_all();
  }

  base::UniqueFd listener_;
  std::atomic<bool> ends_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::vector<base::UniqueFd> clients_;
  int serving_ = 0;
  std::thread accepting_;
};

class Client final : public StoreClient {
 public:
  /// Connects and asks once, so only a store lets the constructor return. It connects again, as torch does,
  /// if a server that is ending drops the connection.
  Client(const ipc::HostPort& peer, std::unique_ptr<Server> server, milliseconds timeout)
      : server_(std::move(server)) {
    for (const auto deadline = base::Deadline::in_seconds(double(timeout.count()) / 1e3);; sched_yield()) {
      try {
        fd_ = connect_to(peer);
        static_cast<void>(has(""));
        return;
      } catch (const std::runtime_error&) {
        if (deadline.passed()) throw;
      }
    }
  }

  void set(const std::string& key, const std::string& value) override {
    ask(Request::set, key);
    write_text(fd_.get(), value);
  }
  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    ask(Request::get, key);
    write_number<std::int64_t>(fd_.get(), patience.count());
    return read_number<bool>(fd_.get()) ? std::optional(read_text(fd_.get())) : std::nullopt;
  }
  bool has(const std::string& key) override {
    ask(Request::has, key);
    return read_number<bool>(fd_.get());
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    ask(Request::add, key);
    write_number(fd_.get(), amount);
    return read_number<std::int64_t>(fd_.get());
  }
  std::vector<std::string> keys() override {
    ask(Request::keys, "");
    std::vector<std::string> keys(read_number<std::size_t>(fd_.get()));
    for (auto& key : keys) key = read_text(fd_.get());
    return keys;
  }
  void erase(const std::string& key) override {
    ask(Request::erase, key);
    read_number<std::size_t>(fd_.get());  // Once the server has replied, all clients see the change.
  }

 private:
  static base::UniqueFd connect_to(const ipc::HostPort& peer) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(peer.port));
    inet_pton(AF_INET, peer.host.c_str(), &address.sin_addr);
    base::UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      throw std::runtime_error(std::strerror(errno));
    return fd;
  }
  void ask(Request request, const std::string& key) {
    write_number(fd_.get(), request);
    write_text(fd_.get(), key);
  }

  std::unique_ptr<Server> server_;
  base::UniqueFd fd_;
};

class PlainTorch final : public Torch {
 public:
  std::unique_ptr<StoreClient> open_store(const ipc::HostPort& peer, int listening_fd,
                                          milliseconds timeout) override {
    return std::make_unique<Client>(
        peer, listening_fd >= 0 ? std::make_unique<Server>(listening_fd) : nullptr, timeout);
  }
  int cuda_device_count() override { return 0; }
  void use_cuda_device(int) override { throw UsageError("there are no devices"); }
};

const bool registered = [] {
  static PlainTorch torch;
  register_torch(torch);
  return true;
}();

}  // namespace
}  // namespace accelmgr::distributed
