#include "base/exception_text.hpp"

#include <cxxabi.h>
#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <typeinfo>

namespace accelmgr::base {

std::string current_exception_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    if (*error.what() != 0) return error.what();
  } catch (...) {
    // Its type is all there is.
  }
  const auto* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "an exception of unknown type";
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr), std::free);
  return fmt::format("an exception of type {} that says nothing", name ? name.get() : type->name());
}

}  // namespace accelmgr::base
