// The TCP port of a service, which it has only if it is asked for one.
#pragma once

#include <string>

#include "base/unique_fd.hpp"

namespace accelmgr::service {

struct TcpListener {
  base::UniqueFd fd;
  std::string address;           ///< HOST:PORT as numbers, with the port that the kernel chose for 0.
  bool others_reach_it = false;  ///< It is not a loopback address.
};

/// Listens at HOST:PORT; an address of IPv6 is [::1]:PORT, and :PORT is that of 127.0.0.1. Blocks while the
/// name is looked up. Throws ConfigError.
TcpListener listen_at(const std::string& address);

}  // namespace accelmgr::service
