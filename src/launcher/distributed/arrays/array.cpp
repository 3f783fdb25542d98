#include "launcher/distributed/arrays/array.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <numeric>

#include "base/did_you_mean.hpp"

namespace accelmgr::distributed {
namespace {

constexpr std::array operations{ReduceOp::sum, ReduceOp::avg,     ReduceOp::product, ReduceOp::min,
                                ReduceOp::max, ReduceOp::bit_and, ReduceOp::bit_or};

}  // namespace

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

DType collective_dtype(std::string_view name) {
  for (auto number = 0; number <= static_cast<int>(DType::boolean); ++number)
    if (const auto dtype = static_cast<DType>(number); name == name_of(dtype)) return dtype;
  throw UsageError(fmt::format("tensors of dtype {} are not supported in collectives", name));
}

void Blocks::check(const Array& array, const char* call) const {
  if (even_) return;
  throw UsageError(
      array.shape.empty()
          ? fmt::format(
                "{}: a 0-d tensor cannot be split; dimension 0 is split into {} blocks, one for each rank",
                call, blocks_)
          : fmt::format("{}: dimension 0 has {} elements, which is not a multiple of the {} ranks", call,
                        array.shape[0], blocks_));
}

std::size_t Array::count() const noexcept {
  return static_cast<std::size_t>(
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
}

}  // namespace accelmgr::distributed
