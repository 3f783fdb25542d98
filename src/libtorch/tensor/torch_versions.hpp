// What torch has changed since 2.6, the oldest that accelmgr is built with.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <concepts>
#include <string>
#include <type_traits>
#include <vector>

#include "accelmgr/errors.hpp"

namespace c10 {
class AcceleratorError;  // Since 2.8.
}

namespace accelmgr::tensor {

template <class T>
concept Known = requires {
  sizeof(T);
};

/// Torch before 2.8 throws c10::Error, whose text says what the device has reported.
struct NeverThrown {
  static int get_error_code() noexcept { return 0; }
};
using AcceleratorError = std::conditional_t<Known<c10::AcceleratorError>, c10::AcceleratorError, NeverThrown>;

/// What CUDA calls the stream. Since 2.11.
template <std::same_as<c10::Stream> Stream>
void* native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); })
    return stream.native_handle();
  else
    throw UsageError("CUDA devices need torch 2.11 or newer; accelmgr was built with an older one");
}

/// A store of torch.distributed takes a socket that is bound already; before 2.9 only without libuv.
inline constexpr bool libuv_takes_sockets = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9;

/// The keys of a store of torch.distributed. Since 2.10.
template <class Store>
std::vector<std::string> keys_of(Store& store) {
  if constexpr (requires { store.listKeys(); })
    return store.listKeys();
  else
    throw UsageError("keys() of a TCPStore needs torch 2.10 or newer; accelmgr was built with an older one");
}

}  // namespace accelmgr::tensor
