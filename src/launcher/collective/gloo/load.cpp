#include "launcher/collective/gloo/load.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "accelmgr/errors.hpp"
#include "launcher/collective/gloo/plugin.hpp"

namespace accelmgr::collective::gloo {
namespace {

constexpr char file_name[] = "libaccelmgr_gloo.so";

struct Loaded {
  const Plugin* plugin = nullptr;
  std::string why_not;
};

/// The folder of the program or, in Python, of the extension module that holds this code.
std::filesystem::path own_folder() {
  static const char here = 0;
  Dl_info info{};
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

/// The paths to try. ACCELMGR_GLOO_PLUGIN alone, if it is set. Otherwise: the name alone, for the dynamic
/// linker, which knows the folder in a build tree; the folder of the program or extension module; the library
/// folder of the installed program; the one into which `cmake --install` puts the plug-in.
std::vector<std::string> candidates() {
  if (const char* named = std::getenv("ACCELMGR_GLOO_PLUGIN"); named != nullptr && *named != '\0')
    return {named};
  std::vector<std::string> paths;
#ifndef ACCELMGR_GLOO_NOT_BUILT  // Sanitizers, which have none, end the process at RTLD_DEEPBIND.
  paths.emplace_back(file_name);
#endif
  if (const auto folder = own_folder(); folder.is_absolute()) paths.push_back((folder / file_name).string());
#ifdef ACCELMGR_GLOO_LIBDIR
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (program.has_parent_path())
    paths.push_back((program.parent_path().parent_path() / ACCELMGR_GLOO_LIBDIR / file_name).string());
  paths.push_back((std::filesystem::path(ACCELMGR_GLOO_PREFIX) / ACCELMGR_GLOO_LIBDIR / file_name).string());
#endif
  return paths;
}

/// Loads the plug-in from `path`. Returns an empty string on success, otherwise the reason.
std::string try_load(const std::string& path, Loaded& loaded) {
  std::error_code ignored;
  if (path != file_name && !std::filesystem::exists(path, ignored))
    return fmt::format("{}: no such file", path);
  // DEEPBIND: the plug-in's references to gloo's symbols resolve to its own libraries before torch's.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (handle == nullptr) return dlerror();
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(handle, plugin_symbol));
  if (entry == nullptr) return fmt::format("{}: it does not export {}", path, plugin_symbol);
  if (entry()->version != plugin_version)
    return fmt::format("{}: its interface has version {}, but this build needs version {}", path,
                       entry()->version, plugin_version);
  loaded.plugin = entry();
  return "";
}

Loaded load() {
  Loaded loaded;
#ifdef ACCELMGR_GLOO_NOT_BUILT
  loaded.why_not = "accelmgr was built without it: " ACCELMGR_GLOO_NOT_BUILT;
#endif
  for (const auto& path : candidates()) {
    const auto why_not = try_load(path, loaded);
    if (why_not.empty()) return loaded;
    loaded.why_not += (loaded.why_not.empty() ? "" : "; ") + why_not;
  }
  loaded.why_not = fmt::format("the gloo plug-in cannot be used: {}", loaded.why_not);
  return loaded;
}

const Loaded& loaded() {
  static const Loaded once = load();
  return once;
}

}  // namespace

std::string unavailable_because() { return loaded().plugin != nullptr ? "" : loaded().why_not; }

const Plugin& plugin() {
  if (loaded().plugin == nullptr) throw UsageError(loaded().why_not);
  return *loaded().plugin;
}

}  // namespace accelmgr::collective::gloo
