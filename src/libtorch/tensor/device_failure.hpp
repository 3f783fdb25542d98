// Errors of torch that tell of a device, and not of the model: the same batch may succeed on another one.
#pragma once

namespace accelmgr::tensor {

/// Call it in the handler of an exception. If torch reports that a device is out of memory, that one of its
/// kernels failed or that one of its libraries did, throws device::DeviceError with the same text; returns
/// otherwise. TorchScript passes on only the texts of such errors, so texts are looked at too.
void rethrow_device_failure();

}  // namespace accelmgr::tensor
