// The exception for everything that a device reports.
#pragma once

#include <string>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/cuda/runtime.hpp"

namespace accelmgr::device {

/// A device is out of memory, was lost, met an illegal address, or hangs; or a team of devices lost a rank.
/// what() has the function, the name of the code and its text: "cudaMalloc: cudaErrorMemoryAllocation (2):
/// out of memory". For a function of NCCL it has the text of the code and NCCL's last error.
class DeviceError : public Error {
 public:
  DeviceError(const std::string& what, std::string function, Code code)
      : Error(what), function_(std::move(function)), code_(code) {}
  /// The function that reported it. An error of work that was queued earlier is reported by a later call.
  const std::string& function() const noexcept { return function_; }
  /// A cudaError_t, or an ncclResult_t if function() is one of NCCL.
  Code code() const noexcept { return code_; }

 private:
  std::string function_;
  Code code_;
};

/// Who is to blame for an error of torch or of a library of CUDA, by its text.
enum class Blame {
  none,    ///< It does not speak of a device.
  device,  ///< A device has failed: another try may succeed.
  model,   ///< A kernel has refused its input, for example an index out of range: the same batch fails again.
};
Blame blame_of(std::string_view text);

}  // namespace accelmgr::device
