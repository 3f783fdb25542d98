#include "python.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace accelmgr::program {

std::string python_interpreter() {
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

std::vector<std::string> python_manager() {
  // env looks the interpreter up in PATH.
  return {"/usr/bin/env", python_interpreter(), "-c",
          "import gc, os, sys; gc.disable(); os.environ['OPENBLAS_NUM_THREADS'] = '1'; "
          "from accelmgr._child import main; main(sys.argv[1:])"};
}

}  // namespace accelmgr::program
