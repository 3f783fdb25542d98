// The store through which processes of several nodes find each other. It is torch's TCPStore, so programs of
// torch.distributed (env://) can use it too. torch itself is server and client
// (launcher/distributed/store/torch.hpp).
//
//   auto socket = ipc::bind_tcp("10.0.0.1", 29500);  // before any process is told of the port
//   auto store = TcpStore::serve(std::move(socket));  // threads begin here
//   auto client = TcpStore::connect("10.0.0.1", 29500, deadline);  // in another process or thread
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.hpp"
#include "base/ipc/tcp.hpp"
#include "base/unique_fd.hpp"
#include "launcher/collective/rendezvous/store.hpp"
#include "launcher/distributed/store/torch.hpp"

namespace accelmgr::distributed {

/// A client of a store. The client that serve() makes also owns the server, which ends with it. If an answer
/// does not come within timing::store_answer_s (the server's node is gone or stopped), the call and all later
/// ones throw SessionError. Both factories throw ConfigError if no torch is registered.
class TcpStore : public collective::Store {
 public:
  /// Serves at a socket of bind_tcp(), in a thread of its own. Throws SessionError.
  static std::unique_ptr<TcpStore> serve(base::UniqueFd socket);
  /// Tries until the deadline. Throws SessionError, which names the address and the reason.
  static std::unique_ptr<TcpStore> connect(const std::string& host, int port, base::Deadline deadline);
  ~TcpStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, base::Deadline deadline) override;
  bool has(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;

  /// Erases all keys, of any client, that do not begin with `prefix`.
  void erase_all_but(const std::string& prefix);

  const std::string& address() const noexcept { return address_; }  ///< HOST:PORT.

 private:
  TcpStore(std::string address, std::unique_ptr<StoreClient> client);
  template <class Call>
  auto ask(Call&& call);

  std::string address_;
  std::unique_ptr<StoreClient> client_;
  std::string
      lost_;  ///< The first error, or empty. Later calls fail too: they could read the answer to this one.
};

}  // namespace accelmgr::distributed
