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
#include "accelmgr/launch.hpp"
#include "base/clock.hpp"
#include "launcher/distributed/store/torch.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;

/// A request {"what", "key", "value"}, or an answer.
using Message = launch::Value;

void require(bool passed) {
  if (!passed) throw std::runtime_error("the connection has ended");
}

void write_message(int fd, const Message& message) {
  const auto bytes = Message::to_cbor(message);
  const auto size = bytes.size();
  require(send(fd, &size, sizeof size, MSG_NOSIGNAL) == sizeof size);
  require(send(fd, bytes.data(), size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
}

Message read_message(int fd) {
  std::size_t size = 0;
  require(recv(fd, &size, sizeof size, MSG_WAITALL) == sizeof size);
  std::vector<std::uint8_t> bytes(size);
  require(recv(fd, bytes.data(), size, MSG_WAITALL) == static_cast<ssize_t>(size));
  return Message::from_cbor(bytes);
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
        const auto request = read_message(fd);
        const auto answer = answer_to(request);
        if (request.at("what") != "set") write_message(fd, answer);  // As torch's does.
      }
    } catch (const std::exception&) {
      shutdown(fd, SHUT_RDWR);
    }
    const std::lock_guard lock(mutex_);
    --serving_;
    changed_.notify_all();
  }

  /// All keys, or the value that the key has now; null if it has none.
  Message answer_to(const Message& request) {
    const std::string what = request.at("what"), key = request.at("key");
    const auto& value = request.at("value");
    std::unique_lock lock(mutex_);
    if (what == "keys") {
      auto keys = Message::array();
      for (const auto& [known, unused] : values_) keys.push_back(known);
      return keys;
    }
    if (what == "get")
      changed_.wait_for(lock, milliseconds(value), [&] { return ends_ || values_.contains(key); });
    if (what == "set") values_[key] = value;
    if (what == "add") {
      auto& sum = values_[key];
      sum = std::to_string((sum.empty() ? 0 : std::stoll(sum)) + value.get<std::int64_t>());
    }
    if (what == "erase") values_.erase(key);
    changed_.notify_all();
    return values_.contains(key) ? Message(values_[key]) : Message();
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

  void set(const std::string& key, const std::string& value) override { send_request("set", key, value); }
  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    const auto value = ask("get", key, patience.count());
    return value.is_null() ? std::nullopt : std::optional(value.get<std::string>());
  }
  bool has(const std::string& key) override { return !ask("has", key).is_null(); }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return std::stoll(ask("add", key, amount).get<std::string>());
  }
  std::vector<std::string> keys() override { return ask("keys", ""); }
  /// Returns when all clients see the change.
  void erase(const std::string& key) override { ask("erase", key); }

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
  void send_request(const char* what, const std::string& key, const Message& value) {
    write_message(fd_.get(), {{"what", what}, {"key", key}, {"value", value}});
  }
  Message ask(const char* what, const std::string& key, const Message& value = {}) {
    send_request(what, key, value);
    return read_message(fd_.get());
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
