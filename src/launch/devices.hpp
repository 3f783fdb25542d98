// The kinds of devices that processes are launched for: one table.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "launch/machine.hpp"

namespace accelmgr::launch {

struct DeviceKind {
  std::string name;      ///< "cpu", "gpu", ...
  std::string label;     ///< In messages and in device names: "GPU" of "GPU:3".
  std::string option;    ///< That selects some of them: "gpus"; empty: none does.
  std::string visible;   ///< The variable that says which of them a process sees; empty: all are seen.
  std::string selected;  ///< The variable that tells a process which one is its own; empty: none has one.
  std::string backend;   ///< Of collectives between processes of one host.
  bool has_driver;       ///< Without one no such device is ever present.
  int (*count)(const Machine&);
};

/// cpu, gpu, xpu, custom.
std::span<const DeviceKind> device_kinds();
/// The kind of that name. There must be one.
const DeviceKind& device_kind(std::string_view name);
/// The kind whose backend this is; null when it is that of none, or of CPUs.
const DeviceKind* device_kind_of_backend(std::string_view backend);

}  // namespace accelmgr::launch
