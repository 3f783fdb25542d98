#include "libtorch/tensor/device_failure.hpp"

#include <c10/util/Exception.h>

#include <string>

#include "base/cuda/error.hpp"
#include "libtorch/tensor/exception_text.hpp"
#include "libtorch/tensor/torch_versions.hpp"

namespace accelmgr::tensor {
namespace {

using device::Blame;

constexpr device::Code unknown_code = 999;  // cudaErrorUnknown

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
  } catch (const AcceleratorError& error) {
    if (device::blame_of(*text) != Blame::model) throw_device_error(*text, error.get_error_code());
  } catch (const c10::Error&) {
    if (device::blame_of(*text) == Blame::device) throw_device_error(*text, unknown_code);
  } catch (const device::DeviceError&) {
    throw;
  } catch (const std::exception& error) {
    if (device::blame_of(error.what()) == Blame::device) throw_device_error(error.what(), unknown_code);
  } catch (...) {
    // No library that computes on a device throws such a type.
  }
}

}  // namespace accelmgr::tensor
