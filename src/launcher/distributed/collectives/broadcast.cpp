#include <fmt/format.h>

#include <utility>

#include "accelmgr/distributed_context.hpp"
#include "launcher/distributed/collectives/arrays.hpp"
#include "launcher/distributed/collectives/objects.hpp"

namespace accelmgr::distributed {
namespace {

// In safe mode the source first sends a header: {"kind", "dtype", "shape"} for a tensor, {"kind", "value"}
// for a number or a text, or {"error"} if it has nothing that can be sent, so that no rank waits for it.
Value header_of(const Sent& sent) {
  if (const auto* number = std::get_if<double>(&sent)) return {{"kind", "number"}, {"value", *number}};
  if (const auto* text = std::get_if<std::string>(&sent))
    return {{"kind", "string"}, {"value", Value::binary({text->begin(), text->end()})}};
  if (const auto* array = std::get_if<Array>(&sent))
    return {{"kind", "tensor"},
            {"dtype", static_cast<int>(array->dtype)},
            {"shape", std::vector<std::int64_t>(array->shape.begin(), array->shape.end())}};
  const auto* unsendable = std::get_if<Unsendable>(&sent);
  return {{"error", unsendable != nullptr ? unsendable->why : "broadcast: the source rank passed no value"}};
}

/// Safe mode for a number or a text. The source may still send another kind, even a tensor.
template <class Kind>
Kind broadcast_expected(const Kind& mine, int src, const char* expected) {
  const auto members = everyone(src);
  if (!members.communicate()) return mine;
  std::vector<std::byte> tensor;
  const auto make = [&](DType dtype, const std::vector<std::int64_t>& shape) {
    tensor.resize(Array{nullptr, dtype, shape}.count() * size_of(dtype));
    return tensor.data();
  };
  auto came = broadcast_safely(members, mine, make, src);
  if (auto* found = std::get_if<Kind>(&came)) return std::move(*found);
  refuse_kind(came, src, expected);
}

}  // namespace

Members everyone(int src) {
  auto members = members_of({});
  if (const int size = members.context.world_size(); src < 0 || src >= size)
    throw UsageError(
        fmt::format("broadcast: there is no rank {} in a world of {}; ranks are counted from 0", src, size));
  return members;
}

Came broadcast_safely(const Members& members, const Sent& mine, const MakeArray& make, int src) {
  const bool source = members.context.rank() == src;
  const auto sent = source ? encode_value(header_of(mine), ObjectKind::broadcast_header) : std::string();
  const auto header =
      decode_value(members.communicator->broadcast_object(sent, src), src, ObjectKind::broadcast_header);
  if (header.contains("error"))
    throw UsageError(fmt::format("{} (rank {})", header.at("error").get<std::string>(), src));
  const auto& kind = header.at("kind").get_ref<const std::string&>();
  if (kind == "number") return header.at("value").get<double>();
  if (kind == "string") {
    const auto& bytes = header.at("value").get_binary();
    return std::string(bytes.begin(), bytes.end());
  }
  const auto dtype = dtype_of_number(header.at("dtype").get<std::uint64_t>());
  const auto shape = header.at("shape").get<std::vector<std::int64_t>>();
  // On the source, broadcast() only reads the memory.
  auto* data = source ? const_cast<void*>(std::get<Array>(mine).data) : make(dtype, shape);
  broadcast(members, {data, dtype, shape}, data, src);
  return ArrayCame{};
}

void refuse_kind(const Came& came, int src, const char* expected) {
  constexpr const char* kinds[]{"a tensor", "a number", "a string"};
  throw CollectiveError(
      fmt::format("broadcast: rank {} sent {}, {} was expected", src, kinds[came.index()], expected),
      CollectiveError::Cause::mismatch, {src});
}

double broadcast(double number, int src, bool safe_mode) {
  if (safe_mode) return broadcast_expected(number, src, "a number");
  const auto members = everyone(src);
  if (members.communicate()) members.communicator->broadcast(&number, 1, DType::float64, src);
  return number;
}

std::string broadcast(const std::string& text, int src, bool safe_mode) {
  if (safe_mode) return broadcast_expected(text, src, "a string");
  const auto members = everyone(src);
  if (!members.communicate()) return text;
  const bool source = members.context.rank() == src;
  return decode_text(members.communicator->broadcast_object(source ? encode_text(text) : "", src), src);
}

}  // namespace accelmgr::distributed
