#include "engine/device/gpu_list.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <climits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/checked_fields.hpp"
#include "base/cuda/cuda_driver.hpp"
#include "base/cuda/nvml.hpp"
#include "base/ipc/cores.hpp"
#include "base/ipc/device_nodes.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/system_calls.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/split.hpp"
#include "engine/device/gpu_claims.hpp"
#include "engine/device/slices.hpp"

namespace accelmgr::device {
namespace {

constexpr const char* visibility = "CUDA_VISIBLE_DEVICES";

[[noreturn]] void answer(int socket, pid_t parent, const DriverQuestion& question, bool all) {
  ipc::die_with(parent);
  // A driver may keep this child in the kernel for ever. Its open descriptors must not keep others waiting
  // then.
  if (socket > 3) ipc::close_descriptors(3, static_cast<unsigned>(socket) - 1);
  ipc::close_descriptors(static_cast<unsigned>(socket) + 1, UINT_MAX);
  if (all) unsetenv(visibility);
  try {
    auto answer = ask_driver(question.library, question.root);
    answer["nvml"] = ask_nvml(question.nvml);
    ipc::send(socket, base::json_text(answer));
  } catch (const std::exception&) {
    _exit(1);  // The parent sees that there is no answer.
  }
  _exit(0);
}

Gpu read_gpu(const base::Fields& gpu) {
  return {.name = gpu.text("name"),
          .uuid = gpu.text("uuid"),
          .memory_bytes = gpu.number<std::uint64_t>("memory_bytes"),
          .major = gpu.number<int>("major"),
          .minor = gpu.number<int>("minor")};
}

std::vector<Gpu> read_gpus(const std::vector<base::Fields>& list) {
  std::vector<Gpu> gpus;
  for (const auto& gpu : list) gpus.push_back(read_gpu(gpu));
  return gpus;
}

/// What CUDA_VISIBLE_DEVICES names; nullopt if it is not set.
std::optional<std::vector<std::string>> entries_of_environment() {
  const char* list = getenv(visibility);
  return list == nullptr ? std::nullopt : std::optional(base::split(list, ','));
}

/// `all`: also what CUDA_VISIBLE_DEVICES hides.
Gpus read(const std::string& text, const DriverQuestion& question, bool all) {
  constexpr const char* what = "the answer of the process that lists GPUs";
  const auto json = base::parse_json(text, what);
  const base::Fields fields(json, what);
  Gpus found;
  if (fields.has("problem"))
    found.why_none = fields.text("problem");
  else
    found.visible = read_gpus(fields.objects("gpus"));
  const auto entries = all ? std::nullopt : entries_of_environment();
  if (json.at("nvml").is_null()) {
    add_named_slices(found, entries.value_or(std::vector<std::string>{}));
    add_named_slices(found, question.named);
    return found;
  }
  std::vector<NvmlGpu> machine;
  for (const auto& gpu : fields.objects("nvml"))
    machine.push_back({read_gpu(gpu), gpu.flag("is_sliced"), read_gpus(gpu.objects("slices"))});
  add_slices(found, machine, entries);
  return found;
}

/// Why a child that has ended gave no answer.
std::string how_ended(const ipc::Child& child) {
  ipc::wait_ended(child.pidfd.get(), base::Deadline::in_seconds(timing::killed_child_ends_s));
  const auto status = ipc::take_exit_status(child.pidfd.get());
  return fmt::format("the driver ended the process that asked it: {}",
                     ipc::describe_exit(status.value_or(ipc::unknown_exit)));
}

/// Why a child that still runs gave no answer.
std::string how_it_hangs(const ipc::Child& child, double timeout_s) {
  const auto where = ipc::wait_channel(child.pid);
  return fmt::format("the driver did not answer within {} s{}", timeout_s,
                     where.empty() ? "" : fmt::format("; it is in {} of the kernel", where));
}

struct Answer {
  Gpus gpus;
  bool is_of_driver = false;  ///< False: the driver hung or crashed.
};

/// `all`: also those that CUDA_VISIBLE_DEVICES hides.
Answer ask_in_child(const DriverQuestion& question, bool all) {
  auto [ours, theirs] = ipc::socket_pair();
  const auto parent = getpid();
  const auto child = ipc::fork_self([&, socket = theirs.get()] { answer(socket, parent, question, all); });
  theirs.reset();
  Answer answer;
  if (ipc::wait_ready(ours.get(), POLLIN, base::Deadline::in_seconds(question.timeout_s)) == 0) {
    answer.gpus.why_none = how_it_hangs(child, question.timeout_s);
  } else if (const auto message = ipc::receive(ours.get(), base::Deadline::at_ns(0))) {
    answer = {read(message->bytes, question, all), true};
  } else {
    answer.gpus.why_none = how_ended(child);
  }
  ipc::end_group(child, base::Deadline::at_ns(0));
  return answer;
}

}  // namespace

Gpus list_gpus(const DriverQuestion& question) {
  auto [found, is_of_driver] = ask_in_child(question, false);
  const auto claimed = claimed_gpus();
  for (auto& gpu : found.visible)
    if (const auto claim = claimed.find(gpu.uuid); claim != claimed.end()) gpu.taken_by = claim->second;
  const char* visible = getenv(visibility);
  if (!found.visible.empty() || !is_of_driver || visible == nullptr) return found;
  if (const auto all = ask_in_child(question, true).gpus.visible.size(); all > 0)
    found.why_none = fmt::format("{} is '{}' and hides {}", visibility, visible,
                                 all == 1 ? "the GPU" : fmt::format("all {} GPUs", all));
  return found;
}

namespace {

/// torch_xla computes on the chips unless PJRT_DEVICE chooses another kind of device.
int tpu_chips(const std::filesystem::path& root) {
  const char* kind = getenv("PJRT_DEVICE");
  const bool chosen = kind == nullptr || *kind == '\0' || std::string_view(kind) == "TPU";
  return chosen ? ipc::tpu_chips(root) : 0;
}

}  // namespace

Machine this_machine(const DriverQuestion& question) {
  return {.gpus = list_gpus(question), .tpu_chips = tpu_chips(question.root), .cores = ipc::allowed_cores()};
}

std::string describe(const Gpus& gpus, std::size_t index) {
  const auto& gpu = gpus.visible.at(index);
  if (gpu.name.empty())
    return fmt::format("GPU {} (a MIG slice that nothing lists here, {})", index, gpu.uuid);
  return fmt::format("GPU {} ({}, {:.1f} GiB, compute capability {}.{}, {})", index, gpu.name,
                     double(gpu.memory_bytes) / (1 << 30), gpu.major, gpu.minor, gpu.uuid);
}

}  // namespace accelmgr::device
