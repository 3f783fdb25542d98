#include "launcher/distributed/collectives/objects.hpp"

#include <fmt/format.h>

#include "accelmgr/communicator.hpp"
#include "base/checked_fields.hpp"

namespace accelmgr::distributed {
namespace {

const char* name_of(ObjectKind kind) {
  return kind == ObjectKind::text               ? "a string"
         : kind == ObjectKind::bytes            ? "an object as bytes"
         : kind == ObjectKind::value            ? "an object"
         : kind == ObjectKind::broadcast_header ? "a broadcast in safe mode"
                                                : "an object of unknown kind";
}

std::string_view body(std::string_view object, int from, ObjectKind expected) {
  const auto kind = static_cast<ObjectKind>(object.empty() ? '\0' : object.front());
  if (kind != expected)
    throw CollectiveError(
        fmt::format("rank {} sent {}, {} was expected", from, name_of(kind), name_of(expected)),
        CollectiveError::Cause::mismatch, {from});
  return object.substr(1);
}

}  // namespace

std::string encode_text(std::string_view text, ObjectKind kind) {
  return static_cast<char>(kind) + std::string(text);
}

std::string encode_value(const launch::Value& value, ObjectKind kind) {
  std::string object(1, static_cast<char>(kind));
  launch::Value::to_cbor(value, object);
  return object;
}

std::string decode_text(std::string_view object, int from, ObjectKind kind) {
  return std::string(body(object, from, kind));
}

launch::Value decode_value(std::string_view object, int from, ObjectKind kind) {
  return base::parse_cbor(body(object, from, kind), fmt::format("{} of rank {}", name_of(kind), from));
}

}  // namespace accelmgr::distributed
