// What this machine has to compute on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/timing.hpp"

namespace accelmgr::device {

/// A GPU, or a slice of one (MIG).
struct Gpu {
  std::string name;  ///< Empty for a slice that only its UUID names: nothing has listed it.
  std::string uuid;  ///< "GPU-8ab1..." or "MIG-8ab1...": CUDA_VISIBLE_DEVICES takes it.
  std::uint64_t memory_bytes = 0;
  int major = 0, minor = 0;  ///< The compute capability.
  std::string taken_by{};    ///< The process whose session computes there, in words; empty if there is none.

  bool operator==(const Gpu&) const = default;
};

/// A GPU whose MIG mode is on: programs compute on its slices only.
struct SlicedGpu {
  Gpu whole;
  std::vector<Gpu> slices;
};

struct Gpus {
  /// The GPUs that CUDA_VISIBLE_DEVICES leaves: first those that CUDA shows this process, by their numbers,
  /// then those on which only other processes can compute.
  std::vector<Gpu> visible;
  std::string why_none;             ///< Why `visible` is empty, in words.
  std::vector<SlicedGpu> sliced{};  ///< Also those that are not visible. Empty without NVML.
};

struct Machine {
  Gpus gpus;
  int tpu_chips = 0;  ///< 0 also if PJRT_DEVICE names another kind of device.
  int cores = 1;
};

struct DriverQuestion {
  std::string library = "libcuda.so.1";
  std::string nvml = "libnvidia-ml.so.1";
  double timeout_s = timing::driver_answer_s;
  std::filesystem::path root = "/";  ///< Of /dev, /proc and /sys.
  std::vector<std::string> named{};  ///< `runners.devices`: lists the slices where nothing else does.
};

/// Lists the GPUs of this process's environment. A child process asks the driver, so this process has neither
/// the driver nor a context in it afterwards, and a driver that hangs or crashes ends the child alone. Call
/// it while this process has one thread. Blocks for at most twice the timeout, and moments more. Throws
/// SystemError if no child can be forked.
Gpus list_gpus(const DriverQuestion& question = {});

/// As list_gpus().
Machine this_machine(const DriverQuestion& question = {});

/// "GPU 0 (NVIDIA H200, 139.8 GiB, compute capability 9.0, GPU-8ab1...)".
std::string describe(const Gpus& gpus, std::size_t index);

}  // namespace accelmgr::device
