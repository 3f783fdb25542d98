#include "launcher/distributed/store/tcp_store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "base/timing.hpp"

namespace accelmgr::distributed {
namespace {

using std::chrono::milliseconds;

milliseconds left(base::Deadline deadline) {
  // At least 1 ms, because c10d takes 0 for no timeout.
  return std::max(milliseconds(deadline.remaining_ns() / 1'000'000), milliseconds(1));
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
  return torch.open_store(peer, listening_fd, left(deadline));
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
