#include "libtorch/tensor/exception_text.hpp"

#include <c10/util/Exception.h>

#include "base/log.hpp"

namespace accelmgr::tensor {

std::optional<std::string> text_of_torch_error() {
  try {
    throw;
  } catch (const c10::Error& error) {
    // what() looks up the names of all frames, which takes long; so call it only if the text is logged.
    if (base::log().shows(base::LogLevel::debug)) base::log().debug("{}", error.what());
    const std::string text = error.what_without_backtrace();
    return text.empty() ? "an error of torch without a text" : text;
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace accelmgr::tensor
