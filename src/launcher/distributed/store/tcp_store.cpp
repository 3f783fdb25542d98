#include "launcher/distributed/store/tcp_store.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "base/ipc/tcp.hpp"
#include "base/parse_number.hpp"
#include "base/timing.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds shut_again{50};

milliseconds left(base::Deadline deadline) {
  // At least 1 ms, because c10d takes 0 for no timeout.
  return std::max(milliseconds(deadline.remaining_ns() / 1'000'000), milliseconds(1));
}

/// Sockets of this process that are connected to `peer`. torch's client does not tell which one is its own.
std::vector<int> connected_to(const ipc::HostPort& peer) {
  std::vector<int> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const auto name = entry.path().filename().string();
    const int fd = base::parse_number<int>(name).value_or(-1);
    if (ipc::peer_of(fd) == peer) found.push_back(fd);
  }
  std::ranges::sort(found);
  return found;
}

/// Sockets connected to `peer` that are not in `before`.
std::vector<int> opened_since(const std::vector<int>& before, const ipc::HostPort& peer) {
  std::vector<int> opened;
  std::ranges::set_difference(connected_to(peer), before, std::back_inserter(opened));
  return opened;
}

/// Bounds the wait for the server's first answer, which torch does not: the program that listens there may
/// not be a store. When the deadline passes before the thread is stopped, it shuts the connection down, so
/// that torch gives up.
std::jthread bound_first_answer(const ipc::HostPort& peer, std::vector<int> before, base::Deadline deadline) {
  return std::jthread([peer, before = std::move(before), deadline](const std::stop_token& came) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any stopped;
    const auto wait = [&](milliseconds time) { stopped.wait_for(lock, came, time, [] { return false; }); };
    for (wait(left(deadline)); !came.stop_requested(); wait(shut_again))  // torch connects again.
      for (const int fd : opened_since(before, peer)) shutdown(fd, SHUT_RDWR);
  });
}

/// Sets timeouts: from now on a missing answer, or a node that vanished, makes a call fail.
void bound_answers(const std::vector<int>& sockets) {
  constexpr auto seconds = static_cast<int>(timing::store_answer_s);
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

/// The first line of the text: torch appends a stack.
std::string reason(const std::exception& error) {
  const std::string_view text = error.what();
  return std::string(text.substr(0, text.find('\n')));
}

Torch& torch_for(const std::string& address) {
  if (auto* torch = registered_torch()) return *torch;
  throw ConfigError(fmt::format(
      "the store at {} is torch's TCPStore, and this program has no torch: link "
      "accelmgr::libtorch_distributed, or let the ranks meet at a file (init_method file:///PATH)",
      address));
}

/// `failure` is the begin of an error's text.
std::unique_ptr<StoreClient> open(Torch& torch, const ipc::HostPort& peer, int listening_fd,
                                  base::Deadline deadline, const std::string& failure) try {
  const auto before = connected_to(peer);
  const auto first_answer = bound_first_answer(peer, before, deadline);
  // torch counts whole seconds. A server listens there already, so a longer timeout does not matter.
  auto client = torch.open_store(peer, listening_fd, std::max(left(deadline), milliseconds(1000)));
  bound_answers(opened_since(before, peer));
  return client;
} catch (const ConfigError&) {
  throw;
} catch (const std::exception& error) {
  throw SessionError(fmt::format("{}: {}", failure, reason(error)));
}

}  // namespace

TcpStore::TcpStore(std::string address, std::unique_ptr<StoreClient> client)
    : address_(std::move(address)), client_(std::move(client)) {}
TcpStore::~TcpStore() = default;

std::unique_ptr<TcpStore> TcpStore::serve(base::UniqueFd socket) {
  const auto address = ipc::address_of(socket.get());
  const auto name = text(address);
  auto& torch = torch_for(name);
  const auto deadline = base::Deadline::in_seconds(timing::store_answer_s);
  return std::unique_ptr<TcpStore>(
      new TcpStore(name, open(torch, ipc::reachable(address), socket.release(), deadline,
                              fmt::format("cannot serve the store at {}", name))));
}

std::unique_ptr<TcpStore> TcpStore::connect(const std::string& host, int port, base::Deadline deadline) {
  const auto name = ipc::text({host, port});
  auto& torch = torch_for(name);
  // Waits here because torch, when it retries, writes to standard error and resolves the name each time.
  const auto peer = ipc::wait_for_listener(host, port, deadline);
  return std::unique_ptr<TcpStore>(
      new TcpStore(name, open(torch, peer, -1, deadline,
                              fmt::format("{} accepts connections, but does not answer as a store", name))));
}

template <class Call>
auto TcpStore::ask(Call&& call) {
  if (!lost_.empty()) throw SessionError(lost_);
  try {
    return call();
  } catch (const std::exception& error) {
    lost_ = fmt::format("the store at {} cannot be reached any more: {}", address_, reason(error));
    throw SessionError(lost_);
  }
}

void TcpStore::set(const std::string& key, const std::string& value) {
  ask([&] { client_->set(key, value); });
}

std::string TcpStore::get(const std::string& key, base::Deadline deadline) {
  const auto patience = left(deadline);
  auto value = ask([&] { return client_->get(key, patience); });
  if (!value)
    throw CollectiveError(fmt::format("no rank has set '{}' in the store at {} within {:.3g} s", key,
                                      address_, static_cast<double>(patience.count()) / 1e3),
                          CollectiveError::Cause::timeout, {});
  return *std::move(value);
}

bool TcpStore::has(const std::string& key) {
  return ask([&] { return client_->has(key); });
}

std::int64_t TcpStore::add(const std::string& key, std::int64_t amount) {
  return ask([&] { return client_->add(key, amount); });
}

void TcpStore::erase_all_but(const std::string& prefix) {
  ask([&] {
    for (const auto& key : client_->keys())
      if (!key.starts_with(prefix)) client_->erase(key);
  });
}

}  // namespace accelmgr::distributed
