// accelmgr: the program. One file per subcommand.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "command_line.hpp"
#include "commands.hpp"
#include "standard_output.hpp"

namespace {

/// `accelmgr spawn OPTIONS -- PROGRAM ARGS`: returns the words after the first `--` and shortens argc. The
/// parser must not see them, because they may look like options.
std::optional<std::vector<std::string>> cut_program(int& argc, char** argv) {
  if (argc < 2 || std::strcmp(argv[1], "spawn") != 0) return std::nullopt;
  const auto is_cut = [](const char* word) { return std::strcmp(word, "--") == 0; };
  char** const end = argv + argc;
  char** const cut = std::find_if(argv, end, is_cut);
  if (cut == end) return std::nullopt;
  argc = static_cast<int>(cut - argv);
  return std::vector<std::string>(cut + 1, end);
}

int refused(const std::string& what) {
  fmt::print(stderr, "{}\n", what);
  return accelmgr::program::exit_usage;
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
  app.require_subcommand(0, 1);  // 0: refused below, with the help.
  app.allow_extras();            // misunderstood() refuses extra words; subcommands inherit this.
  app.formatter(std::make_shared<Formatter>());
  app.footer("Exit codes: 0 done, 1 the run failed, 2 usage or configuration, 130 interrupted.");
  Action action;
  const auto program = cut_program(argc, argv);
  add_train(app, action);
  add_spawn(app, action, program);
  add_serve(app, action);
  add_service_commands(app, action);
  add_trace(app, action);
  add_top(app, action);
  add_config(app, action);
  add_plot(app, action);
  add_info(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    std::ostringstream text;
    app.exit(help, text);
    print_out(text.str());
    return exit_done;
  } catch (const CLI::ParseError& error) {
    const auto better = misunderstood(app);  // Something is often missing because of a typing error.
    if (!better.empty()) return refused(better);
    return app.exit(error) == 0 ? exit_done : exit_usage;
  }
  if (const auto what = misunderstood(app); !what.empty()) return refused(what);
  if (!action) return refused(app.help());
  return action();
}

int report(const std::exception& error) {
  using namespace accelmgr;
  const bool no_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  fmt::print(stderr, "accelmgr: {}\n", no_memory ? "not enough memory" : error.what());
  // ModelError and DataError get here only from the start: they concern a file that the configuration names.
  const bool usage = dynamic_cast<const ConfigError*>(&error) != nullptr ||
                     dynamic_cast<const UsageError*>(&error) != nullptr ||
                     dynamic_cast<const ModelError*>(&error) != nullptr ||
                     dynamic_cast<const DataError*>(&error) != nullptr;
  return usage ? program::exit_usage : program::exit_failed;
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = 0;
  try {
    accelmgr::init(argc, argv);
    exit_code = run(argc, argv);
  } catch (const std::exception& error) {
    exit_code = report(error);
  }
  return accelmgr::program::checked_output(exit_code);
}
