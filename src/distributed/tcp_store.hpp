// The store through which processes of several hosts find each other: c10d's TCPStore, which
// torch.distributed programs (env://) speak too.
//
//   auto socket = bind_tcp("10.0.0.1", 29500);           // The port is ours before anyone is told of it.
//   auto store = TcpStore::serve(std::move(socket));     // Threads begin here.
//   auto client = TcpStore::connect("10.0.0.1", 29500, deadline);   // Elsewhere, or in another thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "collective/store.hpp"
#include "distributed/tcp.hpp"

namespace accelmgr::distributed {

/// One client of a store; of the one that serve() makes the server belongs to it, and ends with it. An answer
/// that does not come within `answer_timeout_s` (its host is gone, or stopped) is a SessionError, and so is
/// every call after that.
class TcpStore : public collective::Store {
 public:
  static constexpr double answer_timeout_s = 10;

  /// Serves at the socket of bind_tcp(), in a thread of its own.
  static std::unique_ptr<TcpStore> serve(base::UniqueFd socket);
  /// Tries until the deadline. Throws SessionError, which names the address and what stood in the way.
  static std::unique_ptr<TcpStore> connect(const std::string& host, int port, base::Deadline deadline);
  ~TcpStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, base::Deadline deadline) override;
  bool has(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;

  /// All keys but those that begin with `prefix`, whoever has set them.
  void erase_all_but(const std::string& prefix);

  const std::string& address() const noexcept { return address_; }  ///< HOST:PORT.

 private:
  struct Client;
  TcpStore(std::string address, std::unique_ptr<Client> client);
  template <class Call>
  auto ask(Call&& call);

  std::string address_;
  std::unique_ptr<Client> client_;
};

}  // namespace accelmgr::distributed
