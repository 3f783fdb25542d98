#include "tensor/exception_text.hpp"

#include <c10/util/Exception.h>

#include "base/exception_text.hpp"
#include "base/log.hpp"

namespace accelmgr::tensor {

std::string current_exception_text() {
  try {
    throw;
  } catch (const c10::Error& error) {
    // Not what() unless it is shown: finding the names of its frames takes long.
    if (base::log().should_log(spdlog::level::debug)) base::log().debug("{}", error.what());
    const std::string text = error.what_without_backtrace();
    return text.empty() ? "an error of torch that says nothing" : text;
  } catch (...) {
    return base::current_exception_text();
  }
}

}  // namespace accelmgr::tensor
