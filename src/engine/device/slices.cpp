#include "engine/device/slices.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strings.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <regex>

#include "base/parse_number.hpp"

namespace accelmgr::device {
namespace {

bool is_listed(const Gpus& gpus, const std::string& uuid) {
  return std::ranges::any_of(gpus.visible, [&](const Gpu& one) { return one.uuid == uuid; });
}

void add(Gpus& gpus, const Gpu& gpu) {
  if (!is_listed(gpus, gpu.uuid)) gpus.visible.push_back(gpu);
}

/// The devices of this GPU that programs can compute on.
std::vector<Gpu> usable(const NvmlGpu& gpu) { return gpu.is_sliced ? gpu.slices : std::vector{gpu.whole}; }

std::vector<Gpu> all_of(const std::vector<NvmlGpu>& machine) {
  std::vector<Gpu> all;
  for (const auto& gpu : machine) std::ranges::copy(usable(gpu), std::back_inserter(all));
  return all;
}

/// What CUDA_VISIBLE_DEVICES names. A GPU that has slices stands for all of them.
std::vector<Gpu> named(const std::vector<std::string>& entries, const std::vector<NvmlGpu>& machine) {
  std::vector<Gpu> meant;
  for (const auto& entry : entries) {
    const auto before = meant.size();
    const auto number = base::parse_number<std::size_t>(entry);
    for (std::size_t i = 0; i < machine.size(); ++i) {
      const bool is_gpu = i == number || (begins(entry, "GPU-") && begins(machine[i].whole.uuid, entry));
      for (const auto& gpu : usable(machine[i]))
        if (is_gpu || (begins(entry, "MIG-") && begins(gpu.uuid, entry))) meant.push_back(gpu);
    }
    if (meant.size() == before) break;  // CUDA hides what follows an unknown one.
  }
  return meant;
}

/// The whole UUID of a slice, as drivers write it: "MIG-8ab1...", or "MIG-GPU-8ab1.../1/0" before R470.
std::optional<std::string> uuid_of_slice(std::string text) {
  static const std::string digits = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}";
  static const std::regex pattern(fmt::format("mig-({0}|gpu-{0}/[0-9]+/[0-9]+)", digits), std::regex::icase);
  if (!std::regex_match(text, pattern)) return std::nullopt;
  std::ranges::transform(text, text.begin(), [](unsigned char letter) { return std::tolower(letter); });
  text.replace(0, 3, "MIG");
  if (text.compare(4, 3, "gpu") == 0) text.replace(4, 3, "GPU");
  return text;
}

}  // namespace

bool begins(const std::string& uuid, std::string_view text) {
  return text.size() <= uuid.size() && strncasecmp(uuid.c_str(), text.data(), text.size()) == 0;
}

void add_slices(Gpus& gpus, const std::vector<NvmlGpu>& machine,
                const std::optional<std::vector<std::string>>& entries) {
  for (const auto& gpu : machine) {
    if (!gpu.is_sliced) continue;
    gpus.sliced.push_back({gpu.whole, gpu.slices});
    std::erase_if(gpus.visible, [&](const Gpu& one) { return one.uuid == gpu.whole.uuid; });
  }
  if (gpus.visible.empty()) {
    for (const auto& gpu : gpus.sliced)
      if (gpu.slices.empty())
        gpus.why_none += fmt::format("{}there is {}", gpus.why_none.empty() ? "" : "; ", why_not_whole(gpu));
    return;
  }
  if (gpus.sliced.empty()) return;
  for (const auto& gpu : entries ? named(*entries, machine) : all_of(machine)) add(gpus, gpu);
}

void add_named_slices(Gpus& gpus, const std::vector<std::string>& names) {
  if (gpus.visible.empty()) return;
  for (const auto& name : names)
    if (const auto uuid = uuid_of_slice(name)) add(gpus, {.name = {}, .uuid = *uuid});
}

std::string why_not_whole(const SlicedGpu& gpu) {
  std::vector<std::string> slices;
  for (const auto& slice : gpu.slices) slices.push_back(slice.uuid);
  return fmt::format(
      "the GPU {} ({}), whose MIG mode is on: only slices of it compute; {}, or turn MIG mode "
      "off (nvidia-smi -mig 0)",
      gpu.whole.name, gpu.whole.uuid,
      slices.empty() ? "it has no slice: make some (nvidia-smi mig -cgi)"
                     : fmt::format("name a slice of it: {}", fmt::join(slices, " or ")));
}

}  // namespace accelmgr::device
