// accelmgr plot: a picture of a training run, drawn by the Python package.
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "commands.hpp"

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

/// That of the environment into which the wheel has put this program; that of the build; the one in PATH.
std::string interpreter() {
  std::error_code error;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = own.parent_path() / "python3";
  if (access(beside.c_str(), X_OK) == 0) return beside;
#ifdef ACCELMGR_BUILT_PACKAGE
  if (access(ACCELMGR_BUILT_PACKAGE "/accelmgr", R_OK) == 0 && access(ACCELMGR_BUILT_PYTHON, X_OK) == 0) {
    const char* path = getenv("PYTHONPATH");
    setenv("PYTHONPATH",
           fmt::format("{}{}{}", ACCELMGR_BUILT_PACKAGE, path ? ":" : "", path ? path : "").c_str(), 1);
    return ACCELMGR_BUILT_PYTHON;
  }
#endif
  return "python3";
}

}  // namespace

void add_plot(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("plot", "Draws loss, throughput and shares of time of a run (--log) as PNG or SVG");
  command->set_help_flag();  // What follows is the package's, its help too.
  command->prefix_command();
  command->callback([&action, command] {
    action = [command] {
      const auto python = interpreter();
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
