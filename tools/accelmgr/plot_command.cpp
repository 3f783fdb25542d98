// accelmgr plot: a picture of a training run, drawn by the Python package.
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "commands.hpp"
#include "python.hpp"

namespace accelmgr::program {
namespace {

constexpr const char* script = R"(
import sys
try:
    from accelmgr.__main__ import main
except ImportError as error:
    sys.exit(f"accelmgr plot: {sys.executable} cannot import the package accelmgr ({error}); in a checkout: pip install .")
main()
)";

}  // namespace

void add_plot(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("plot", "Draws loss, throughput and shares of time of a run (--log) as PNG or SVG");
  command->set_help_flag();  // No --help here: the package parses all words.
  command->prefix_command();
  command->callback([&action, command] {
    action = [command] {
      const auto python = python_interpreter();
      std::vector<std::string> words = {python, "-c", script, "plot"};
      for (const auto& word : command->remaining()) words.push_back(word);
      std::vector<char*> argv;
      for (auto& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      execvp(python.c_str(), argv.data());
      fmt::print(stderr, "accelmgr plot: {}: {}\n", python, strerror(errno));
      return exit_failed;
    };
  });
}

}  // namespace accelmgr::program
