#include "base/ipc/device_nodes.hpp"

#include <algorithm>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/parse_number.hpp"

namespace accelmgr::ipc {
namespace {

namespace fs = std::filesystem;

/// Empty if the folder cannot be read.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code unreadable;
  for (fs::directory_iterator entry(folder, unreadable), end; !unreadable && entry != end;
       entry.increment(unreadable))
    entries.push_back(entry->path());
  return entries;
}

/// The number in "nvidia3"; -1 for other names, as nvidiactl and nvidia-uvm.
int number_of_gpu(const std::string& name) {
  constexpr std::string_view prefix = "nvidia";
  if (!name.starts_with(prefix)) return -1;
  return base::parse_number<int>(std::string_view(name).substr(prefix.size())).value_or(-1);
}

std::string first_word(const fs::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

bool is_tpu(const fs::path& device) {
  constexpr std::string_view google = "0x1ae0";
  // v2 and v3, v4, v5e, v6e, and two without a public name.
  constexpr std::string_view chips[] = {"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062"};
  return first_word(device / "vendor") == google &&
         std::ranges::find(chips, first_word(device / "device")) != std::end(chips);
}

}  // namespace

std::vector<std::string> gpu_nodes(const fs::path& root) {
  std::vector<std::pair<int, std::string>> found;
  for (const auto& path : entries_of(root / "dev"))
    if (const int number = number_of_gpu(path.filename()); number >= 0) found.emplace_back(number, path);
  std::ranges::sort(found);
  std::vector<std::string> nodes;
  nodes.reserve(found.size());
  for (auto& [number, path] : found) nodes.push_back(std::move(path));
  return nodes;
}

int driver_gpus(const fs::path& root) {
  const auto nodes = gpu_nodes(root).size();
  return static_cast<int>(nodes > 0 ? nodes : entries_of(root / "proc/driver/nvidia/gpus").size());
}

int tpu_chips(const fs::path& root) {
  return static_cast<int>(std::ranges::count_if(entries_of(root / "sys/bus/pci/devices"), is_tpu));
}

}  // namespace accelmgr::ipc
