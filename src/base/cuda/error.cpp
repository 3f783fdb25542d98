#include "base/cuda/error.hpp"

#include <algorithm>
#include <array>

namespace accelmgr::device {
namespace {

template <std::size_t count>
bool has_one_of(std::string_view text, const std::array<std::string_view, count>& parts) {
  return std::ranges::any_of(parts, [&](auto part) { return text.find(part) != std::string_view::npos; });
}

// How torch begins the texts of errors of CUDA and of its libraries.
constexpr std::array<std::string_view, 6> of_device{"CUDA error",        "CUDA out of memory",
                                                    "CUDA driver error", "CUBLAS_STATUS_",
                                                    "CUDNN_STATUS_",     "cuDNN error"};
constexpr std::array<std::string_view, 2> of_model{"device-side assert", "cudaErrorAssert"};

}  // namespace

Blame blame_of(std::string_view text) {
  if (has_one_of(text, of_model)) return Blame::model;
  return has_one_of(text, of_device) ? Blame::device : Blame::none;
}

}  // namespace accelmgr::device
