// Libraries that a process loads only when it asks for them, and the functions in them.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace accelmgr::device {

/// The first library that is there, or why there is none. It stays loaded.
struct SharedLibrary {
  /// Takes one of `loaded`, names without a folder, if the process has it already. Otherwise loads the first
  /// of `candidates`.
  SharedLibrary(std::span<const char* const> loaded, const std::vector<std::string>& candidates);

  /// Sets `function` to the function with that name, or notes that it is missing.
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(address_of(name));
  }
  /// Why there is no library, or which functions are missing; empty if all are there.
  const std::string& why_not() const noexcept { return why_not_; }
  /// Throws UsageError, with `what` and the reasons, if there is no library or if a function is missing.
  void check(const char* what, const char* where_from) const;

 private:
  void* address_of(const char* name);

  void* library_ = nullptr;
  std::string path_;
  std::string why_not_;
};

}  // namespace accelmgr::device
