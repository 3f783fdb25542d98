#include "program_path.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

#include "accelmgr/errors.hpp"

namespace accelmgr::program {
namespace {

constexpr const char* path_if_none = "/usr/local/bin:/usr/bin:/bin";

/// The errno value of the reason; 0 if the file can be executed.
int why_not_executable(const std::string& file) noexcept {
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  return access(file.c_str(), X_OK) == 0 ? 0 : errno;
}

std::string path_of(const std::map<std::string, std::string>& environment) {
  const auto found = environment.find("PATH");
  return found == environment.end() ? path_if_none : found->second;
}

/// Throws unless `name` is an executable file (a name with a slash) or is found in `path`.
void check_executable(const std::string& name, const std::string& path) {
  if (name.empty()) throw ConfigError("PROGRAM is empty");
  if (name.find('/') != std::string::npos) {
    if (const int code = why_not_executable(name); code != 0)
      throw ConfigError(fmt::format("cannot execute {}: {}", name, strerrordesc_np(code)));
    return;
  }
  std::string found_but;
  std::istringstream folders(path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto file = (folder.empty() ? "." : folder) + "/" + name;
    const int code = why_not_executable(file);
    if (code == 0) return;
    if (code == EACCES) found_but = file;
  }
  if (!found_but.empty())
    throw ConfigError(fmt::format("cannot execute {}: {}", found_but, strerrordesc_np(EACCES)));
  throw ConfigError(fmt::format("there is no program '{}' in PATH ({}){}", name, path,
                                access(name.c_str(), F_OK) == 0
                                    ? fmt::format("; to run the file of this directory, write ./{}", name)
                                    : ""));
}

void check_readable(const std::string& file) {
  struct stat status {};
  int code = stat(file.c_str(), &status) != 0 ? errno : 0;
  if (code == 0 && S_ISDIR(status.st_mode)) code = EISDIR;
  if (code == 0 && access(file.c_str(), R_OK) != 0) code = errno;
  if (code != 0) throw ConfigError(fmt::format("cannot run {}: {}", file, strerrordesc_np(code)));
}

}  // namespace

std::vector<std::string> resolve_program(std::vector<std::string> program,
                                         const std::map<std::string, std::string>& environment, bool python) {
  if (python && program.front().ends_with(".py")) {
    check_readable(program.front());
    program.insert(program.begin(), "python3");
  }
  check_executable(program.front(), path_of(environment));
  return program;
}

}  // namespace accelmgr::program
