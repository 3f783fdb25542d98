// Slices of GPUs (MIG). The CUDA driver shows a process one slice at most, and no whole GPU beside it, though
// each of several processes can have another one. So NVML lists the slices, or those that are named are taken
// to be there.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/device/gpu_list.hpp"

namespace accelmgr::device {

/// A GPU as NVML lists it.
struct NvmlGpu {
  Gpu whole;
  bool is_sliced = false;  ///< Its MIG mode is on.
  std::vector<Gpu> slices{};
};

/// Whether `text` is the beginning of `uuid`, in any case of letters.
bool begins(const std::string& uuid, std::string_view text);

/// Adds the slices, and the whole GPUs beside them, that CUDA could show to other processes. `entries`: what
/// CUDA_VISIBLE_DEVICES names, or nullopt if it is not set. Adds nothing where no MIG mode is on, or where
/// CUDA shows nothing; then `why_none` also tells of GPUs that lack slices.
void add_slices(Gpus& gpus, const std::vector<NvmlGpu>& machine,
                const std::optional<std::vector<std::string>>& entries);

/// Adds the slices among `names` that are not listed, because they may be there; adds none if CUDA shows
/// nothing. An abbreviated UUID names no slice.
void add_named_slices(Gpus& gpus, const std::vector<std::string>& names);

/// Why programs cannot compute on the whole GPU, and what would be right.
std::string why_not_whole(const SlicedGpu& gpu);

}  // namespace accelmgr::device
