#include "engine/client/service_name.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "accelmgr/errors.hpp"

namespace accelmgr::client {
namespace {

constexpr const char* key = "--socket";
constexpr std::string_view prefix = "accelmgr", suffix = ".sock";
constexpr std::string_view of_names = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

std::filesystem::path runtime_folder(const std::string& what) {
  const char* folder = std::getenv("XDG_RUNTIME_DIR");
  if (folder == nullptr || *folder == '\0')
    throw ConfigError(
        fmt::format("{}, and XDG_RUNTIME_DIR is not set; give a path with a slash, as /tmp/own/run.sock",
                    what),
        key);
  return folder;
}

void check_name(const std::string& name) {
  if (name.ends_with(suffix))
    throw ConfigError(
        fmt::format("'{}' without a slash is the name of a session; as a path it is './{}'", name, name),
        key);
  if (name.find_first_not_of(of_names) != std::string::npos)
    throw ConfigError(
        fmt::format("'{}' is no name of a session, which has letters, digits, '.', '_' and '-' alone", name),
        key);
}

}  // namespace

std::string socket_path(const std::string& given) {
  if (given.find('/') != std::string::npos) return given;
  if (given.empty()) return runtime_folder("--socket is missing") / fmt::format("{}{}", prefix, suffix);
  check_name(given);
  return runtime_folder(fmt::format("'{}' is the name of a session", given)) /
         fmt::format("{}-{}{}", prefix, given, suffix);
}

std::vector<NamedSocket> named_sockets() {
  std::vector<NamedSocket> found;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(runtime_folder("Services are listed by their names"), error)) {
    auto name = entry.path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(suffix) || !entry.is_socket(error)) continue;
    name = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
    if (name.empty() || name.starts_with('-'))
      found.push_back({name.empty() ? name : name.substr(1), entry.path().string()});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

}  // namespace accelmgr::client
