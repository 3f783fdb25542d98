// The border between accelmgr and the plug-in that holds gloo: plain C, so that neither side's C++ library,
// exceptions or symbols meet the other's. torch exports its own copy of gloo; this one must stay apart.
//
// A mesh is one connection between any two of its ranks. Over it go messages: each is sent by one rank and
// received by another, which has named the same slot; those of one slot in their order. Nothing closes a
// connection but close(), the end of a peer, or the network: a wait that ends without success harms nothing.
//
// A mesh belongs to one thread at a time. A function that fails fills `Error`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace accelmgr::collective::gloo {

inline constexpr std::uint32_t plugin_version = 1;
inline constexpr char plugin_symbol[] = "accelmgr_gloo_plugin";

extern "C" {

struct PluginError {
  char text[512];  ///< Ends with NUL.
};

/// The caller's store. Both return whether they succeeded; if not, connect() fails. `get` waits.
struct PluginStore {
  void* self;
  bool (*set)(void* self, const char* key, const char* data, std::size_t bytes);
  bool (*get)(void* self, const char* key, void* sink,
              void (*take)(void* sink, const char* data, std::size_t bytes));
};

struct PluginMesh;
struct PluginMessage;

enum PluginState { plugin_pending, plugin_done, plugin_failed };

struct Plugin {
  std::uint32_t version;  ///< plugin_version
  /// Waits for all others; null when it failed. `address`: a numeric one of this host.
  PluginMesh* (*connect)(const PluginStore* store, const char* address, int rank, int size, double timeout_s,
                         PluginError* error);
  /// Closes all connections, at once. Messages under way fail; those that are done still arrive.
  void (*close)(PluginMesh* mesh);
  /// Closes, and frees. All messages must have been freed.
  void (*free_mesh)(PluginMesh* mesh);

  /// Null when the connection has failed. The memory must stay until free_message().
  PluginMessage* (*send)(PluginMesh* mesh, int to, std::uint64_t slot, const void* data, std::size_t bytes,
                         PluginError* error);
  PluginMessage* (*receive)(PluginMesh* mesh, int from, std::uint64_t slot, void* data, std::size_t bytes,
                            PluginError* error);
  /// Not again once it has said that the message is done, or has failed.
  PluginState (*wait)(PluginMessage* message, double timeout_s, PluginError* error);
  /// One that is still under way only after close().
  void (*free_message)(PluginMessage* message);
};

using PluginEntry = const Plugin* (*)();

}  // extern "C"

}  // namespace accelmgr::collective::gloo
