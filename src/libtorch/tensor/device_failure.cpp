#include "libtorch/tensor/device_failure.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "base/cuda/error.hpp"
#include "libtorch/tensor/exception_text.hpp"

namespace accelmgr::tensor {
namespace {

constexpr device::Code unknown_code = 999;  // cudaErrorUnknown

// How torch begins the texts of errors of CUDA and of its libraries.
constexpr std::array<std::string_view, 6> marks{"CUDA out of memory", "CUDA error",   "CUDA driver error",
                                                "CUBLAS_STATUS_",     "CUDNN_STATUS", "cuDNN error"};

bool tells_of_device(std::string_view text) {
  return std::ranges::any_of(
      marks, [&](std::string_view mark) { return text.find(mark) != std::string_view::npos; });
}

[[noreturn]] void throw_device_error(const std::string& text, device::Code code) {
  throw device::DeviceError(text, "torch", code);
}

}  // namespace

void rethrow_device_failure() {
  const auto text = text_of_torch_error();
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw_device_error(*text, device::code::out_of_memory);
  } catch (const c10::AcceleratorError& error) {
    throw_device_error(*text, error.get_error_code());
  } catch (const c10::Error&) {
    if (tells_of_device(*text)) throw_device_error(*text, unknown_code);
  } catch (const device::DeviceError&) {
    throw;
  } catch (const std::exception& error) {
    if (tells_of_device(error.what())) throw_device_error(error.what(), unknown_code);
  } catch (...) {
    // Of no library that computes on a device.
  }
}

}  // namespace accelmgr::tensor
