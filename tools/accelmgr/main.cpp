// accelmgr: the program. One file per subcommand.
#include <fmt/core.h>

#include <CLI/CLI.hpp>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "commands.hpp"

namespace {

int run(int argc, char** argv) {
  using namespace accelmgr::program;
  CLI::App app{
      "Makes a machine with several accelerators look like one fast device to an optimizer: a manager "
      "process owns the master\n"
      "model, one runner per device computes gradients, and the host runs the optimizer.\n\n"
      "Begin with:  accelmgr train --config configs/gpt-licenses.yaml",
      "accelmgr"};
  app.set_version_flag("--version", ACCELMGR_VERSION);
  app.require_subcommand(0, 1);  // None is answered with the help, by us.
  app.footer("Exit codes: 0 done, 1 the run failed, 2 usage or configuration, 130 interrupted.");
  Action action;
  add_train(app, action);
  add_config(app, action);
  add_info(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? exit_done : exit_usage;
  }
  if (!action) {
    fmt::print(stderr, "{}", app.help());
    return exit_usage;
  }
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    accelmgr::init(argc, argv);
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "accelmgr: {}\n", error.what());
    const bool run_failed = dynamic_cast<const accelmgr::RunnerError*>(&error) != nullptr;
    return run_failed ? accelmgr::program::exit_failed : accelmgr::program::exit_usage;
  }
}
