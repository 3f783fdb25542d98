#include "libtorch/distributed/tensors.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <sstream>

#include "accelmgr/errors.hpp"
#include "libtorch/tensor/convert.hpp"
#include "libtorch/tensor/torch_versions.hpp"

namespace accelmgr::distributed {
namespace {

std::string layout_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.layout();
  return text.str();
}

bool has_collectives(DType dtype) noexcept { return dtype <= DType::boolean; }

template <class Name>
[[noreturn]] void refuse_dtype(const Name& name) {
  throw UsageError(fmt::format("tensors of dtype {} are not supported in collectives", name));
}

}  // namespace

DType dtype_of(at::ScalarType type) {
  const auto dtype = tensor::find_dtype(type);
  if (!dtype || !has_collectives(*dtype)) refuse_dtype(c10::toString(type));
  return *dtype;
}

at::ScalarType scalar_type(DType dtype) {
  if (!has_collectives(dtype)) refuse_dtype(name_of(dtype));
  return tensor::scalar_type(dtype);
}

at::Tensor dense(const at::Tensor& tensor, std::string_view call) {
  const auto refuse = [&](const std::string& what) { throw UsageError(fmt::format("{}: {}", call, what)); };
  if (!tensor.defined()) refuse("an undefined tensor was passed");
  if (tensor.is_quantized())
    refuse(fmt::format("quantized tensors ({}) are not supported; pass int_repr() and the parameters",
                       c10::toString(tensor.scalar_type())));
  if (tensor.is_nested()) refuse("nested tensors are not supported; pass their parts");
  if (tensor.layout() != at::kStrided)
    refuse(fmt::format("tensors of layout {} are not supported; pass a dense one", layout_of(tensor)));
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda())
    refuse(fmt::format("the tensor is on {}, but the collectives of this context are on cpu and cuda",
                       tensor.device().str()));
  dtype_of(tensor.scalar_type());
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

Array array_of(const at::Tensor& dense_tensor) {
  const auto sizes = dense_tensor.sizes();
  return {dense_tensor.const_data_ptr(), dtype_of(dense_tensor.scalar_type()), {sizes.data(), sizes.size()}};
}

at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef shape) {
  return at::empty(shape, tensor.options().requires_grad(false));
}

at::Tensor carried(const at::Tensor& source, at::Tensor result, const Collective& collective) {
  if (source.is_cpu()) {
    collective(array_of(source), result.mutable_data_ptr(), nullptr);
    return result;
  }
  const c10::DeviceGuard guard(source.device());
  const auto stream = c10::impl::VirtualGuardImpl(source.device().type()).getStream(source.device());
  const OnDevice place{source.device().index(),
                       static_cast<device::StreamHandle>(tensor::native_handle(stream))};
  if (collective(array_of(source), result.mutable_data_ptr(), &place)) return result;
  const auto mine = source.cpu();
  auto received = at::empty(result.sizes(), mine.options());
  collective(array_of(mine), received.mutable_data_ptr(), nullptr);
  return result.copy_(received);
}

}  // namespace accelmgr::distributed
