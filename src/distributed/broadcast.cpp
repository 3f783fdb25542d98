#include <fmt/format.h>

#include <utility>

#include "accelmgr/distributed.hpp"
#include "distributed/collectives.hpp"
#include "distributed/objects.hpp"
#include "distributed/tensors.hpp"

namespace accelmgr::distributed {
namespace {

Members everyone(int src) {
  auto members = members_of({});
  check_rank(members.context, "broadcast", src);
  return members;
}

/// The source's is returned as it is; the others get new memory.
at::Tensor broadcast_tensor(const Members& members, const at::Tensor& tensor, int src) {
  const auto mine = dense(tensor, "broadcast");
  auto data = members.communicator->rank() == src ? mine : empty_like(mine, mine.sizes());
  members.communicator->broadcast(data.mutable_data_ptr(), count_of(data), dtype_of(data.scalar_type()), src,
                                  options_for(data));
  return data;
}

// In safe mode the source tells first what will come: {"kind", "dtype", "shape"} of a tensor, {"kind",
// "value"} of the rest; or {"error"}, so that nobody waits for what the source cannot send.
Value header_of(const Broadcast& anything) {
  if (const auto* number = std::get_if<double>(&anything)) return {{"kind", "number"}, {"value", *number}};
  if (const auto* text = std::get_if<std::string>(&anything))
    return {{"kind", "string"}, {"value", Value::binary({text->begin(), text->end()})}};
  const auto* tensor = std::get_if<at::Tensor>(&anything);
  if (tensor == nullptr) return {{"error", "broadcast: the source passed nothing"}};
  try {
    const auto data = dense(*tensor, "broadcast");
    return {{"kind", "tensor"},
            {"dtype", static_cast<int>(dtype_of(data.scalar_type()))},
            {"shape", data.sizes().vec()}};
  } catch (const UsageError& error) {
    return {{"error", error.what()}};
  }
}

Broadcast broadcast_safely(const Broadcast& anything, int src) {
  const auto members = everyone(src);
  if (!members.communicate()) {
    if (std::holds_alternative<std::monostate>(anything))
      throw UsageError("broadcast: the source passed nothing");
    return anything;
  }
  const bool source = members.context.rank() == src;
  const auto sent = source ? encode_value(header_of(anything), ObjectKind::broadcast_header) : std::string();
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
  if (source) return broadcast_tensor(members, std::get<at::Tensor>(anything), src);
  const auto like = empty_cpu(scalar_type(header.at("dtype").get<DType>()),
                              header.at("shape").get<std::vector<std::int64_t>>());
  return broadcast_tensor(members, like, src);
}

/// In safe mode, what came, which must be of the kind that is returned.
template <class Kind>
Kind broadcast_expected(const Broadcast& anything, int src, const char* expected) {
  auto result = broadcast_safely(anything, src);
  if (auto* found = std::get_if<Kind>(&result)) return std::move(*found);
  constexpr const char* kinds[]{"nothing", "a tensor", "a number", "a string"};
  throw CollectiveError(
      fmt::format("broadcast: rank {} sent {}, {} was expected", src, kinds[result.index()], expected),
      CollectiveError::Cause::mismatch, {src});
}

}  // namespace

at::Tensor broadcast(const at::Tensor& tensor, int src, bool safe_mode) {
  if (safe_mode)
    return broadcast_expected<at::Tensor>(tensor.defined() ? Broadcast(tensor) : Broadcast(), src,
                                          "a tensor");
  const auto members = everyone(src);
  return members.communicate() ? broadcast_tensor(members, tensor, src) : tensor;
}

double broadcast(double number, int src, bool safe_mode) {
  if (safe_mode) return broadcast_expected<double>(number, src, "a number");
  const auto members = everyone(src);
  if (members.communicate()) members.communicator->broadcast(&number, 1, DType::float64, src);
  return number;
}

std::string broadcast(const std::string& text, int src, bool safe_mode) {
  if (safe_mode) return broadcast_expected<std::string>(text, src, "a string");
  const auto members = everyone(src);
  if (!members.communicate()) return text;
  const bool source = members.context.rank() == src;
  return decode_text(members.communicator->broadcast_object(source ? encode_text(text) : "", src), src);
}

Broadcast broadcast(const Broadcast& anything, int src, bool safe_mode) {
  if (safe_mode) return broadcast_safely(anything, src);
  if (const auto* tensor = std::get_if<at::Tensor>(&anything)) return broadcast(*tensor, src);
  if (const auto* number = std::get_if<double>(&anything)) return broadcast(*number, src);
  if (const auto* text = std::get_if<std::string>(&anything)) return broadcast(*text, src);
  throw UsageError("broadcast: nothing was passed; only safe mode finds out what will come");
}

}  // namespace accelmgr::distributed
