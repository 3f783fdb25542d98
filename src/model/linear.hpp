// x W^T + b, by the fastest of torch's matrix products.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace accelmgr::model {

/// `x` [rows, in], `weight` [out, in], `bias` [out] -> [rows, out]. Differentiable once.
///
/// at::linear() multiplies float32 by MKL, whose kernels for processors of other vendors reach less than half
/// of what oneDNN's do (2048 x 128 x 512 on one Zen 5 core: 2.9 ms against 1.2; 32 x 2048 x 2048: 4.3
/// against 1.8). So large float32 products go to oneDNN, small ones, whose time is the call, and all other
/// dtypes to at::linear().
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace accelmgr::model
