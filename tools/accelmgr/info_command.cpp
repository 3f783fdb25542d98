// accelmgr info: versions, devices, and what this build contains.
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <spdlog/version.h>
#include <boost/version.hpp>

#include <utility>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/model.hpp"
#include "base/ipc/cores.hpp"
#include "base/ipc/memory.hpp"
#include "commands.hpp"
#include "engine/device/gpu_list.hpp"
#include "engine/session/kernels.hpp"
#include "standard_output.hpp"

namespace accelmgr::program {
namespace {

template <class... Values>
void say(fmt::format_string<Values...> format, Values&&... values) {
  print_out(fmt::format(format, std::forward<Values>(values)...));
}

void say_devices() {
  const auto machine = device::this_machine();
  const auto cores = ipc::cores();
  const auto openmp = ipc::openmp_threads();
  say("devices      cpu ({} cores, limited by {}{})\n", cores.count, cores.limit,
      openmp ? fmt::format("; OMP_NUM_THREADS: {} threads in each process", *openmp) : "");
  const auto& gpus = machine.gpus;
  for (std::size_t i = 0; i < gpus.visible.size(); ++i) {
    const auto& taken_by = gpus.visible[i].taken_by;
    say("             {}{}\n", device::describe(gpus, i), taken_by.empty() ? "" : "; taken by " + taken_by);
  }
  if (gpus.visible.empty()) say("             {}\n", fmt::format("no GPU can be used: {}", gpus.why_none));
  if (machine.tpu_chips > 0) say("             {}\n", fmt::format("{} TPU chips", machine.tpu_chips));
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  app.add_subcommand("info", "Prints versions, devices, and what this build contains")->callback([&action] {
    action = [] {
      const auto available = ipc::memory_available();
      say("accelmgr     {} ({} build, g++ {})\n", ACCELMGR_VERSION, ACCELMGR_BUILD_TYPE, __VERSION__);
      say("torch        {}\n", ACCELMGR_TORCH_VERSION);
      say("boost        {}.{}.{}\n", BOOST_VERSION / 100000, BOOST_VERSION / 100 % 1000, BOOST_VERSION % 100);
      say("spdlog       {}.{}.{}\n", SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH);
      say_devices();
      say("kernels      {}\n", to_string(session::best_kernels().isa()));
      say("memory       {:.1f} GiB available ({})\n", double(available.bytes) / (1 << 30),
          available.limited_by);
      say("models       {}\n", fmt::join(model_kinds(), ", "));
      say("data         {}\n", fmt::join(data_kinds(), ", "));
      say("optimizers   sgd, adam, adamw\n");
      return exit_done;
    };
  });
}

}  // namespace accelmgr::program
