// x W^T + b, by the fastest of torch's matrix products.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace accelmgr::model {

/// `x` [rows, in], `weight` [out, in], `bias` [out] -> [rows, out]. Differentiable once.
///
/// at::linear() uses MKL for float32. On processors of other vendors than Intel, MKL reaches less than half
/// the speed of oneDNN (2048 x 128 x 512 on one Zen 5 core: 2.9 ms against 1.2; 32 x 2048 x 2048: 4.3 against
/// 1.8). So large float32 products on the CPU use oneDNN. Small ones, in which the call dominates, and other
/// dtypes use at::linear().
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace accelmgr::model
