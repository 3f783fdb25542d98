// accelmgr: the program. One file per subcommand.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "commands.hpp"

namespace {

/// `accelmgr spawn OPTIONS -- PROGRAM ARGS`: what stands after the first `--` is the program's, whatever it
/// looks like; the parser does not see it. Shortens argc.
std::optional<std::vector<std::string>> cut_program(int& argc, char** argv) {
  if (argc < 2 || std::strcmp(argv[1], "spawn") != 0) return std::nullopt;
  const auto is_cut = [](const char* word) { return std::strcmp(word, "--") == 0; };
  char** const end = argv + argc;
  char** const cut = std::find_if(argv, end, is_cut);
  if (cut == end) return std::nullopt;
  argc = static_cast<int>(cut - argv);
  return std::vector<std::string>(cut + 1, end);
}

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
  const auto program = cut_program(argc, argv);
  add_train(app, action);
  add_spawn(app, action, program);
  add_config(app, action);
  add_plot(app, action);
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
    const bool run_failed = dynamic_cast<const accelmgr::RunnerError*>(&error) != nullptr ||
                            dynamic_cast<const accelmgr::CheckpointError*>(&error) != nullptr;
    return run_failed ? accelmgr::program::exit_failed : accelmgr::program::exit_usage;
  }
}
