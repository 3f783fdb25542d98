#include "base/cuda/cuda_driver.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "base/errno_text.hpp"
#include "base/ipc/device_nodes.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::device {
namespace {

using nlohmann::json;

/// Why there are no GPUs.
using Problem = std::runtime_error;

/// What the kernel adds to a problem: whether there are GPUs, and whether this process may open them.
std::string said_by_kernel(const std::filesystem::path& root) {
  const auto nodes = ipc::gpu_nodes(root);
  if (nodes.empty()) return "no device of an NVIDIA GPU is in /dev";
  for (const auto& node : nodes)
    if (const base::UniqueFd opened(open(node.c_str(), O_RDWR | O_CLOEXEC)); !opened)
      return fmt::format("this process cannot open {}: {}", node, base::errno_text(errno));
  return fmt::format("the GPUs' devices are there, and this process can open them ({})",
                     fmt::join(nodes, ", "));
}

void* open_driver(const std::string& library) {
  if (void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) return opened;
  const std::string why = dlerror();
  const bool is_absent = why.find("No such file") != std::string::npos;
  throw Problem(is_absent ? fmt::format("there is no driver library {}", library)
                          : fmt::format("the driver library cannot be loaded: {}", why));
}

CudaDriver functions_of(const std::string& library) {
  void* opened = open_driver(library);
  CudaDriver driver{};
  const auto find = [&](auto& function, const char* name) {
    void* address = dlsym(opened, name);
    if (address == nullptr) throw Problem(fmt::format("the driver library {} has no {}", library, name));
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define FIND(result, member, function, parameters) find(driver.member, #function);
  ACCELMGR_CUDA_DRIVER(FIND)
#undef FIND
  const bool has_second = dlsym(opened, "cuDeviceGetUuid_v2") != nullptr;  // Drivers since 470 have it.
  find(driver.device_get_uuid, has_second ? "cuDeviceGetUuid_v2" : "cuDeviceGetUuid");
  return driver;
}

void check(const CudaDriver& driver, const std::string& call, int code) {
  if (code == CudaDriver::success) return;
  const char *name = nullptr, *text = nullptr;
  if (driver.get_error_name(code, &name) != CudaDriver::success || name == nullptr) name = "an unknown error";
  if (driver.get_error_string(code, &text) != CudaDriver::success || text == nullptr) text = "no text";
  throw Problem(fmt::format("{}: {} ({}): {}", call, name, code, text));
}

/// The UUID as CUDA_VISIBLE_DEVICES and nvidia-smi write it. A slice of a GPU is known by its name, as in
/// "NVIDIA A100 MIG 1g.5gb".
std::string text_of(const DriverUuid& uuid, std::string_view name) {
  std::string text = name.find(" MIG ") != std::string_view::npos ? "MIG-" : "GPU-";
  for (std::size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

json describe(const CudaDriver& driver, int ordinal) {
  const auto checked = [&](const char* function, int code) {
    check(driver, fmt::format("{} of GPU {}", function, ordinal), code);
  };
  int device = 0, major = 0, minor = 0;
  std::array<char, 256> name{};
  std::size_t memory_bytes = 0;
  DriverUuid uuid{};
  checked("cuDeviceGet", driver.device_get(&device, ordinal));
  checked("cuDeviceGetName", driver.device_get_name(name.data(), int(name.size()) - 1, device));
  checked("cuDeviceGetUuid", driver.device_get_uuid(&uuid, device));
  checked("cuDeviceTotalMem", driver.device_total_mem(&memory_bytes, device));
  checked("cuDeviceGetAttribute", driver.device_get_attribute(&major, CudaDriver::major_attribute, device));
  checked("cuDeviceGetAttribute", driver.device_get_attribute(&minor, CudaDriver::minor_attribute, device));
  return {{"name", name.data()},
          {"memory_bytes", memory_bytes},
          {"uuid", text_of(uuid, name.data())},
          {"major", major},
          {"minor", minor}};
}

/// cuInit, which fails in a fork of a process that has called it.
void initialize(const CudaDriver& driver, bool was_there) {
  try {
    check(driver, "cuInit", driver.init(0));
  } catch (const Problem& problem) {
    if (!was_there) throw;
    throw Problem(fmt::format(
        "{}; the driver ran already in the process that this one was forked from, and a fork cannot "
        "use it: the start methods spawn and forkserver fork another process",
        problem.what()));
  }
}

json ask(const std::string& library) {
  const bool was_there = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr;
  const auto driver = functions_of(library);
  int count = 0;
  initialize(driver, was_there);
  check(driver, "cuDeviceGetCount", driver.device_get_count(&count));
  if (count == 0) throw Problem("the driver lists no GPU");
  json gpus = json::array();
  for (int ordinal = 0; ordinal < count; ++ordinal) gpus.push_back(describe(driver, ordinal));
  return {{"gpus", gpus}};
}

}  // namespace

json ask_driver(const std::string& library, const std::filesystem::path& root) {
  try {
    return ask(library);
  } catch (const Problem& problem) {
    return {{"problem", fmt::format("{}; {}", problem.what(), said_by_kernel(root))}};
  }
}

}  // namespace accelmgr::device
