#include "launcher/collective/signature/signature.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "launcher/collective/signature/argument_checks.hpp"

namespace accelmgr::collective {
namespace {

constexpr std::array<std::string_view, 10> kinds{"nothing",
                                                 "all_reduce",
                                                 "reduce_scatter",
                                                 "all_gather",
                                                 "broadcast",
                                                 "all_to_all",
                                                 "barrier",
                                                 "all_gather of objects",
                                                 "broadcast of an object",
                                                 "group"};

bool has_elements(CallKind kind) noexcept {
  return kind >= CallKind::all_reduce && kind <= CallKind::all_to_all;
}

}  // namespace

Signature make_signature(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
                         std::uint64_t sequence, const CallOptions& options) {
  Signature signature{};
  signature.sequence = sequence;
  signature.kind = kind;
  signature.root = root;
  if (!has_elements(kind)) return signature;
  signature.count = count;
  signature.dtype = dtype;
  if (kind == CallKind::all_reduce || kind == CallKind::reduce_scatter) signature.op = op;
  const auto whole = static_cast<std::int64_t>(count);
  const auto shape = options.shape.data() == nullptr ? std::span(&whole, 1) : options.shape;
  signature.dimensions = static_cast<std::uint8_t>(std::min(shape.size(), most_dimensions)) & 0x7fu;
  signature.on_devices = options.on_devices ? 1 : 0;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    auto& entry = signature.shape[std::min(i, most_dimensions - 1)];
    entry = i < most_dimensions ? shape[i] : entry * shape[i];
  }
  return signature;
}

std::string describe(const Signature& signature) {
  const auto kind = kinds[static_cast<std::size_t>(signature.kind)];
  const bool rooted = signature.kind == CallKind::broadcast || signature.kind == CallKind::broadcast_object;
  auto text = rooted ? fmt::format("{} from rank {}", kind, signature.root) : std::string(kind);
  if (!has_elements(signature.kind)) return text;
  if (signature.kind == CallKind::all_reduce || signature.kind == CallKind::reduce_scatter)
    text += fmt::format(" {}", name_of(signature.op));
  const std::span shape(signature.shape.data(), signature.dimensions);
  return fmt::format("{} {} [{}]{}", text, name_of(signature.dtype), fmt::join(shape, ", "),
                     signature.on_devices ? " on a device" : "");
}

void check_same(std::span<const Signature> signatures, const std::vector<int>& ranks) {
  std::vector<int> different;
  for (std::size_t i = 1; i < signatures.size(); ++i)
    if (signatures[i] != signatures[0]) different.push_back(ranks[i]);
  if (different.empty()) return;
  // Ranks that made the same call are named together, in the order of ranks.
  std::string calls;
  for (std::size_t i = 0; i < signatures.size(); ++i) {
    const auto first = std::find(signatures.begin(), signatures.end(), signatures[i]);
    if (static_cast<std::size_t>(first - signatures.begin()) != i) continue;
    std::vector<int> same;
    for (std::size_t j = i; j < signatures.size(); ++j)
      if (signatures[j] == signatures[i]) same.push_back(ranks[j]);
    calls +=
        fmt::format("{}{} called {}", calls.empty() ? "" : "; ", names_of(same), describe(signatures[i]));
  }
  throw CollectiveError(fmt::format("call {} differs: {}", signatures[0].sequence, calls),
                        CollectiveError::Cause::mismatch, std::move(different));
}

std::string numbered(const Signature& signature) {
  return fmt::format("call {} ({})", signature.sequence, describe(signature));
}

}  // namespace accelmgr::collective
