// Accelerators of this machine, as the kernel lists them in /dev, /proc and /sys. No library of a vendor is
// loaded, so these say what is there, not whether it can be used.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace accelmgr::ipc {

/// The device nodes of NVIDIA GPUs below `root`, in the order of their numbers: /dev/nvidia0, ... In a
/// container these show the GPUs that it was given, while /proc shows all of the machine.
std::vector<std::string> gpu_nodes(const std::filesystem::path& root = "/");

/// The number of GPUs of NVIDIA's driver, by their nodes. Without nodes, as on a machine that has not used
/// its GPUs since it booted, by their entries in /proc. Ignores CUDA_VISIBLE_DEVICES.
int driver_gpus(const std::filesystem::path& root = "/");

/// The number of TPU chips on the PCI bus, counted as torch_xla does: by Google's vendor number, which its
/// network cards have too, and the device numbers of the chips.
int tpu_chips(const std::filesystem::path& root = "/");

}  // namespace accelmgr::ipc
