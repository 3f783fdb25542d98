// The kinds of devices that processes are launched for: one table.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "launcher/launch/plan/node_info.hpp"

namespace accelmgr::launch {

struct DeviceKind {
  std::string name;        ///< "cpu", "gpu", ...
  std::string label;       ///< In messages and in device names: "GPU" of "GPU:3".
  std::string backend;     ///< The backend of collectives between processes of one node.
  std::string option{};    ///< The option that selects devices of this kind ("gpus"). Empty: there is none.
  std::string visible{};   ///< The variable that limits the devices a process sees. Empty: it sees all.
  std::string selected{};  ///< The variable that names the device of a process. Empty: it has no own device.
  std::string flag{};  ///< Paddle's variable for the number of that device among those it sees; may be empty.
  int NodeInfo::*devices = nullptr;  ///< Null: this build has no driver for such devices.

  int count(const NodeInfo& node_info) const { return devices == nullptr ? 0 : node_info.*devices; }
};

/// cpu, gpu, xpu, custom.
std::span<const DeviceKind> device_kinds();
/// The kind called `name`. Throws std::logic_error if there is none.
const DeviceKind& device_kind(std::string_view name);
/// The kind that uses this backend. Null if no kind does, or only CPUs do.
const DeviceKind* device_kind_of_backend(std::string_view backend);

}  // namespace accelmgr::launch
