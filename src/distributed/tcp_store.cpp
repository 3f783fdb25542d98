#include "distributed/tcp_store.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "distributed/quiet_torch.hpp"
#include "distributed/tcp.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds shut_again{50};

milliseconds left(base::Deadline deadline) {
  // To c10d zero means no timeout at all.
  return std::max(milliseconds(deadline.remaining_ns() / 1'000'000), milliseconds(1));
}

/// Sockets of this process that are connected to `peer`. torch's client does not tell which one is its own.
std::vector<int> connected_to(const HostPort& peer) {
  std::vector<int> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const auto name = entry.path().filename().string();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (peer_of(fd) == peer) found.push_back(fd);
  }
  std::ranges::sort(found);
  return found;
}

/// Those that are new since `before`.
std::vector<int> opened_since(const std::vector<int>& before, const HostPort& peer) {
  std::vector<int> opened;
  std::ranges::set_difference(connected_to(peer), before, std::back_inserter(opened));
  return opened;
}

/// torch waits for the server's first answer for ever. What listens there may be no store at all: the
/// connection is shut down when the deadline passes first.
class FirstAnswer {
 public:
  FirstAnswer(const HostPort& peer, std::vector<int> before, base::Deadline deadline)
      : watcher_([this, peer, before = std::move(before), deadline] {
          std::unique_lock lock(mutex_);
          if (came_.wait_for(lock, left(deadline), [this] { return has_come_; })) return;
          do {  // torch connects again.
            for (const int fd : opened_since(before, peer)) shutdown(fd, SHUT_RDWR);
          } while (!came_.wait_for(lock, shut_again, [this] { return has_come_; }));
        }) {}
  ~FirstAnswer() {
    {
      const std::lock_guard lock(mutex_);
      has_come_ = true;
    }
    came_.notify_one();
    watcher_.join();
  }
  FirstAnswer(const FirstAnswer&) = delete;
  FirstAnswer& operator=(const FirstAnswer&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  bool has_come_ = false;
  std::thread watcher_;
};

/// From now on an answer that does not come, and a host that is gone without a word, are errors.
void bound_answers(const std::vector<int>& sockets) {
  constexpr auto seconds = static_cast<int>(TcpStore::answer_timeout_s);
  const timeval receive{.tv_sec = seconds, .tv_usec = 0};
  const int acknowledge_ms = seconds * 1000;
  const int on = 1;
  for (const int fd : sockets) {
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &receive, sizeof receive);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &receive, sizeof receive);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &acknowledge_ms, sizeof acknowledge_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
}

/// What torch says, without its stack.
std::string reason(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string_view text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return std::string(text.substr(0, text.find('\n')));
}

c10d::TCPStoreOptions options(int port, base::Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  // It counts whole seconds; that somebody listens is known by now.
  options.timeout = std::max(left(deadline), milliseconds(1000));
  return options;
}

c10::intrusive_ptr<c10d::TCPStore> open(const HostPort& peer, const c10d::TCPStoreOptions& options,
                                        base::Deadline deadline) {
  const auto before = connected_to(peer);
  const QuietTorch quiet;
  const FirstAnswer first_answer(peer, before, deadline);
  auto store = c10::make_intrusive<c10d::TCPStore>(peer.host, options);
  bound_answers(opened_since(before, peer));
  return store;
}

}  // namespace

struct TcpStore::Client {
  c10::intrusive_ptr<c10d::TCPStore> store;
  std::string lost;  ///< Why it is of no use any more: a late answer would be taken for that of a later call.
};

TcpStore::TcpStore(std::string address, std::unique_ptr<Client> client)
    : address_(std::move(address)), client_(std::move(client)) {}
TcpStore::~TcpStore() = default;

std::unique_ptr<TcpStore> TcpStore::serve(base::UniqueFd socket) {
  const auto address = address_of(socket.get());
  const auto deadline = base::Deadline::in_seconds(answer_timeout_s);
  auto server = options(address.port, deadline);
  server.isServer = true;
  server.masterListenFd = socket.release();
  try {
    auto store = open(reachable(address), server, deadline);
    return std::unique_ptr<TcpStore>(new TcpStore(text(address), std::make_unique<Client>(std::move(store))));
  } catch (const std::exception& error) {
    throw SessionError(fmt::format("cannot serve the store at {}: {}", text(address), reason(error)));
  }
}

std::unique_ptr<TcpStore> TcpStore::connect(const std::string& host, int port, base::Deadline deadline) {
  const auto name = launch::text({host, port});
  // torch says on standard error how it tries again and again, and resolves the name each time.
  const auto peer = wait_for_listener(host, port, deadline);
  try {
    return std::unique_ptr<TcpStore>(
        new TcpStore(name, std::make_unique<Client>(open(peer, options(port, deadline), deadline))));
  } catch (const std::exception& error) {
    throw SessionError(
        fmt::format("{} accepts connections, but does not answer as a store: {}", name, reason(error)));
  }
}

template <class Call>
auto TcpStore::ask(Call&& call) {
  if (!client_->lost.empty()) throw SessionError(client_->lost);
  const QuietTorch quiet;
  try {
    return call(*client_->store);
  } catch (const c10::DistStoreError&) {
    throw;  // A wait that was too long: both sides know, and go on.
  } catch (const std::exception& error) {
    client_->lost = fmt::format("the store at {} cannot be reached any more: {}", address_, reason(error));
    throw SessionError(client_->lost);
  }
}

void TcpStore::set(const std::string& key, const std::string& value) {
  ask([&](c10d::TCPStore& store) { store.set(key, std::vector<std::uint8_t>(value.begin(), value.end())); });
}

std::string TcpStore::get(const std::string& key, base::Deadline deadline) {
  const auto patience = left(deadline);
  try {
    return ask([&](c10d::TCPStore& store) {
      store.wait({key}, patience);
      const auto value = store.get(key);
      return std::string(value.begin(), value.end());
    });
  } catch (const c10::DistStoreError&) {
    throw CollectiveError(fmt::format("nobody has set '{}' in the store at {} within {:.3g} s", key, address_,
                                      static_cast<double>(patience.count()) / 1e3),
                          CollectiveError::Cause::timeout, {});
  }
}

bool TcpStore::has(const std::string& key) {
  return ask([&](c10d::TCPStore& store) { return store.check({key}); });
}

std::int64_t TcpStore::add(const std::string& key, std::int64_t amount) {
  return ask([&](c10d::TCPStore& store) { return store.add(key, amount); });
}

void TcpStore::erase_all_but(const std::string& prefix) {
  ask([&](c10d::TCPStore& store) {
    for (const auto& key : store.listKeys())
      if (!key.starts_with(prefix)) store.deleteKey(key);
  });
}

}  // namespace accelmgr::distributed
