#include "python.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "accelmgr/errors.hpp"

namespace accelmgr::program {

std::string python_interpreter() {
  std::error_code error;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = own.parent_path() / "python3";
  if (access(beside.c_str(), X_OK) == 0) return beside;
#ifdef ACCELMGR_BUILT_PACKAGE
  const auto package = (own.parent_path() / ACCELMGR_BUILT_PACKAGE).lexically_normal();
  const auto python = (own.parent_path() / ACCELMGR_BUILT_PYTHON).lexically_normal();
  if (access((package / "accelmgr").c_str(), R_OK) == 0 && access(python.c_str(), X_OK) == 0) {
    const char* path = getenv("PYTHONPATH");
    setenv("PYTHONPATH", fmt::format("{}{}{}", package.string(), path ? ":" : "", path ? path : "").c_str(),
           1);
    return python;
  }
#endif
  return "python3";
}

/// env looks the interpreter up in PATH.
static std::vector<std::string> python_that_calls(const std::string& function) {
  return {"/usr/bin/env", python_interpreter(), "-c",
          fmt::format("import gc, os, sys; gc.disable(); os.environ['OPENBLAS_NUM_THREADS'] = '1'; "
                      "from accelmgr._process.child import {0}; {0}(sys.argv[1:])",
                      function)};
}

std::vector<std::string> python_manager() { return python_that_calls("main"); }

bool is_of_python(const Config& config) {
  return config.model.kind == "python" || config.data.kind == "python";
}

void execute_python_service(const std::vector<std::string>& arguments) {
  auto command = python_that_calls("serve");
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (auto& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  throw SystemError("executing " + command[1], errno);
}

}  // namespace accelmgr::program
