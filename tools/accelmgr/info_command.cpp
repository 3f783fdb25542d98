// accelmgr info: versions, devices, and what this build contains.
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <spdlog/version.h>
#include <boost/version.hpp>

#include <thread>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/model.hpp"
#include "commands.hpp"
#include "ipc/memory.hpp"
#include "session/kernels.hpp"

namespace accelmgr::program {

void add_info(CLI::App& app, Action& action) {
  app.add_subcommand("info", "Prints versions, devices, and what this build contains")->callback([&action] {
    action = [] {
      const auto available = ipc::memory_available();
      fmt::print("accelmgr     {} ({} build, g++ {})\n", ACCELMGR_VERSION, ACCELMGR_BUILD_TYPE, __VERSION__);
      fmt::print("torch        {}\n", ACCELMGR_TORCH_VERSION);
      fmt::print("boost        {}.{}.{}\n", BOOST_VERSION / 100000, BOOST_VERSION / 100 % 1000,
                 BOOST_VERSION % 100);
      fmt::print("spdlog       {}.{}.{}\n", SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH);
      fmt::print("devices      cpu ({} cores)\n", std::thread::hardware_concurrency());
      fmt::print("kernels      {}\n", to_string(session::best_kernels().isa()));
      fmt::print("memory       {:.1f} GiB available ({})\n", double(available.bytes) / (1 << 30),
                 available.limited_by);
      fmt::print("models       {}\n", fmt::join(model_kinds(), ", "));
      fmt::print("data         {}\n", fmt::join(data_kinds(), ", "));
      fmt::print("optimizers   sgd, adam, adamw\n");
      return exit_done;
    };
  });
}

}  // namespace accelmgr::program
