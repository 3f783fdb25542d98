#include "base/exception_text.hpp"

#include <cxxabi.h>
#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <typeinfo>

namespace accelmgr::base {
namespace {

TextOfForeign foreign = nullptr;

}  // namespace

void know_foreign_exceptions(TextOfForeign text_of) { foreign = text_of; }

std::string current_exception_text() {
  if (foreign != nullptr)
    if (auto text = foreign()) return *text;
  try {
    throw;
  } catch (const std::exception& error) {
    if (*error.what() != 0) return error.what();
  } catch (...) {
    // No std::exception: only its type is known.
  }
  const auto* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "an exception of unknown type";
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr), std::free);
  return fmt::format("an exception of type {} without a text", name ? name.get() : type->name());
}

}  // namespace accelmgr::base
