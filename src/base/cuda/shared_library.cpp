#include "base/cuda/shared_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include "accelmgr/errors.hpp"

namespace accelmgr::device {

SharedLibrary::SharedLibrary(std::span<const char* const> loaded,
                             const std::vector<std::string>& candidates) {
  for (const char* name : loaded) {
    path_ = fmt::format("{}, which is loaded already", name);
    if (library_ = dlopen(name, RTLD_NOW | RTLD_NOLOAD); library_ != nullptr) return;
  }
  std::string reasons;
  for (const auto& candidate : candidates) {
    path_ = candidate;
    if (library_ = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL); library_ != nullptr) return;
    reasons += fmt::format("{}; ", dlerror());
  }
  why_not_ = std::move(reasons);
}

void* SharedLibrary::address_of(const char* name) {
  if (library_ == nullptr) return nullptr;
  void* address = dlsym(library_, name);
  if (address == nullptr) why_not_ += fmt::format("{}: it has no {}; ", path_, name);
  return address;
}

void SharedLibrary::check(const char* what, const char* where_from) const {
  if (library_ == nullptr || !why_not_.empty())
    throw UsageError(fmt::format("{} cannot be used: {}{}", what, why_not_, where_from));
}

}  // namespace accelmgr::device
