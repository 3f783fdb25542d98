// Where services listen: at a path, or under the name of a session.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::client {

/// The path of a service's socket. `given` is that path, if it has a slash; a session's name, which stands
/// for accelmgr-NAME.sock in $XDG_RUNTIME_DIR; or empty, for accelmgr.sock there. Throws ConfigError: it is
/// neither, or there is no XDG_RUNTIME_DIR.
std::string socket_path(const std::string& given);

struct NamedSocket {
  std::string name;  ///< Empty: accelmgr.sock.
  std::string path;
};

/// The sockets of services in $XDG_RUNTIME_DIR, by name. A killed service may have left its own. Throws
/// ConfigError as socket_path().
std::vector<NamedSocket> named_sockets();

}  // namespace accelmgr::client
