// The agent of torchrun, as ranks see it: the environment that it sets, and its store.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/ipc/network.hpp"
#include "base/unique_fd.hpp"
#include "launcher/distributed/store/tcp_store.hpp"

namespace accelmgr::distributed {

using Variables = std::map<std::string, std::string>;

/// Where several processes must do something within the time: a busy machine may stop one of them meanwhile.
inline constexpr double together_s = 1.5;

/// The environment that torchrun's agent sets.
inline Variables torchrun_variables(int port, int world_size) {
  return {{"RANK", "{rank}"},
          {"LOCAL_RANK", "{rank}"},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
          {"GROUP_RANK", "0"},
          {"GROUP_WORLD_SIZE", "1"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RESTART_COUNT", "2"}};
}

/// The agent of torchrun, with a port that is bound here. A rank serves the store, because its threads would
/// not survive a fork.
class Agent {
 public:
  Agent() : socket_(ipc::bind_tcp("127.0.0.1", 0)), port_(ipc::bound_port(socket_.get())) {}
  Variables variables(int world_size) const { return torchrun_variables(port_, world_size); }
  /// Call it in one rank, before that rank connects.
  std::unique_ptr<TcpStore> serve() { return TcpStore::serve(std::move(socket_)); }
  int port() const { return port_; }

 private:
  base::UniqueFd socket_;
  int port_;
};

}  // namespace accelmgr::distributed
