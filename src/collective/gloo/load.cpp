#include "collective/gloo/load.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "accelmgr/errors.hpp"
#include "collective/gloo/factory.hpp"

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

/// ACCELMGR_GLOO_PLUGIN, if it is set, and nothing else; or: the build tree, beside the extension module of
/// Python, beside the installed program that runs, where `cmake --install` puts it.
std::vector<std::string> candidates() {
  if (const char* named = std::getenv("ACCELMGR_GLOO_PLUGIN"); named != nullptr && *named != '\0')
    return {named};
  std::vector<std::string> paths;
#ifdef ACCELMGR_GLOO_BUILT
  paths.emplace_back(ACCELMGR_GLOO_BUILT);
#endif
  if (const auto folder = own_folder(); folder.is_absolute()) paths.push_back((folder / file_name).string());
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (program.has_parent_path())
    paths.push_back((program.parent_path().parent_path() / ACCELMGR_GLOO_LIBDIR / file_name).string());
  paths.push_back((std::filesystem::path(ACCELMGR_GLOO_PREFIX) / ACCELMGR_GLOO_LIBDIR / file_name).string());
  return paths;
}

/// Empty when `loaded` has it now, else why not.
std::string try_load(const std::string& path, Loaded& loaded) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return fmt::format("{}: no such file", path);
  // DEEPBIND: what gloo exports is looked for in the plug-in and its libraries first, not in torch.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (handle == nullptr) return dlerror();
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(handle, plugin_symbol));
  if (entry == nullptr) return fmt::format("{}: it has no {}", path, plugin_symbol);
  if (entry()->version != plugin_version)
    return fmt::format("{}: its interface is version {}, not {}", path, entry()->version, plugin_version);
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
