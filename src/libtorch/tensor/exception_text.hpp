// Texts of torch's errors.
#pragma once

#include <optional>
#include <string>

namespace accelmgr::tensor {

/// Call it in an exception handler; for base::know_foreign_exceptions(). Returns the text of a c10::Error
/// without its C++ frames, and logs the frames at level debug. nullopt for other exceptions.
std::optional<std::string> text_of_torch_error();

}  // namespace accelmgr::tensor
