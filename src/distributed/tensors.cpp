#include "distributed/tensors.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>
#include <vector>

#include "base/nearest.hpp"

namespace accelmgr::distributed {
namespace {

std::string layout_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.layout();
  return text.str();
}

constexpr std::array operations{ReduceOp::sum, ReduceOp::avg,     ReduceOp::product, ReduceOp::min,
                                ReduceOp::max, ReduceOp::bit_and, ReduceOp::bit_or};

}  // namespace

at::Tensor dense(const at::Tensor& tensor, std::string_view call) {
  const auto refuse = [&](const std::string& what) { throw UsageError(fmt::format("{}: {}", call, what)); };
  if (!tensor.defined()) refuse("an undefined tensor was passed");
  if (tensor.is_quantized())
    refuse(fmt::format("quantized tensors ({}) are not supported; pass int_repr() and the parameters",
                       c10::toString(tensor.scalar_type())));
  if (tensor.is_nested()) refuse("nested tensors are not supported; pass their parts");
  if (tensor.layout() != at::kStrided)
    refuse(fmt::format("tensors of layout {} are not supported; pass a dense one", layout_of(tensor)));
  if (!tensor.device().is_cpu())
    refuse(fmt::format("the tensor is on {}, but the collectives of this context are on cpu",
                       tensor.device().str()));
  dtype_of(tensor.scalar_type());
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor empty_like(const at::Tensor& tensor, at::IntArrayRef shape) {
  return at::empty(shape, tensor.options().requires_grad(false));
}

at::Tensor empty_cpu(at::ScalarType type, at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions(type));
}

std::size_t count_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

CallOptions options_for(const at::Tensor& tensor) {
  static constexpr std::int64_t of_0_d = 0;  // Its shape is empty, but not unknown.
  const auto sizes = tensor.sizes();
  return {.shape = sizes.empty() ? std::span(&of_0_d, 0) : std::span(sizes.data(), sizes.size())};
}

ReduceOp reduce_op(const std::string& name) {
  std::vector<std::string> known;
  for (const auto op : operations) {
    if (name == name_of(op)) return op;
    known.emplace_back(name_of(op));
  }
  std::string upper = name;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  throw UsageError(fmt::format("unknown reduction '{}'{}; there are {}", name,
                               base::did_you_mean(upper, known), fmt::join(known, ", ")));
}

at::ScalarType scalar_type(DType dtype) {
  constexpr std::array types{at::kByte,  at::kChar,   at::kUInt16,       at::kShort,         at::kUInt32,
                             at::kInt,   at::kUInt64, at::kLong,         at::kHalf,          at::kBFloat16,
                             at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kBool};
  return types.at(static_cast<std::size_t>(dtype));
}

}  // namespace accelmgr::distributed
