// The interface between accelmgr and the plug-in that holds gloo. It is plain C, so that C++ libraries,
// exceptions and symbols of the two sides never meet. torch exports its own copy of gloo; this one must stay
// apart.
//
// A mesh connects every two of its ranks. A message goes from one rank to another; sender and receiver name
// the same slot. Messages of one slot arrive in their order. Only close(), the end of a peer, or the network
// closes a connection: a wait that times out does no harm.
//
// A mesh is not thread-safe. A function that fails fills in its `error`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace accelmgr::collective::gloo {

inline constexpr std::uint32_t plugin_version = 3;
inline constexpr char plugin_symbol[] = "accelmgr_gloo_plugin";

extern "C" {

struct PluginError {
  char text[512];  ///< Ends with NUL.
};

struct PluginMesh;
struct PluginMessage;

enum PluginState { plugin_pending, plugin_done, plugin_failed };

struct Plugin {
  std::uint32_t version;  ///< plugin_version
  /// Makes a mesh that is not connected yet; null when that failed. `address` is a numeric address of this
  /// host. `timeout_s`: of connect().
  PluginMesh* (*create)(const char* address, int rank, int size, double timeout_s, PluginError* error);
  /// The addresses of this rank, which its peers need for connect(): `*bytes` bytes that belong to the mesh.
  const char* (*addresses)(PluginMesh* mesh, std::size_t* bytes);
  /// Blocks until `peer` is connected, whose addresses these are; false when that failed. All ranks connect
  /// to their peers in the order of ranks.
  bool (*connect)(PluginMesh* mesh, int peer, const char* addresses, std::size_t bytes, PluginError* error);
  /// Closes all connections at once. Pending messages fail; completed ones still arrive.
  void (*close)(PluginMesh* mesh);
  /// Closes all connections and frees the mesh. All messages must have been freed.
  void (*free_mesh)(PluginMesh* mesh);

  /// Starts a message to `peer`, or the receipt of one from it; null when the connection has failed. The
  /// memory at `data` must stay until free_message(). It is not written to if `sends`.
  PluginMessage* (*begin)(PluginMesh* mesh, int peer, std::uint64_t slot, void* data, std::size_t bytes,
                          bool sends, PluginError* error);
  /// Must not be called again for a message that it has reported as done or failed.
  PluginState (*wait)(PluginMessage* message, double timeout_s, PluginError* error);
  /// Frees a message. One that is still pending may be freed only after close().
  void (*free_message)(PluginMessage* message);
};

using PluginEntry = const Plugin* (*)();

}  // extern "C"

}  // namespace accelmgr::collective::gloo
