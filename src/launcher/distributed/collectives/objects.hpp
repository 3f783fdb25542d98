// The encoding of texts, bytes and values that ranks send: one byte for the kind, then the text or bytes, or
// the value as CBOR.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/distributed_context.hpp"

namespace accelmgr::distributed {

enum class ObjectKind : char { text = 't', bytes = 'b', value = 'v', broadcast_header = 'h' };

std::string encode_text(std::string_view text, ObjectKind kind = ObjectKind::text);
std::string encode_value(const launch::Value& value, ObjectKind kind = ObjectKind::value);

/// These throw CollectiveError{mismatch}, which names `from`, if the object has another kind: then the ranks
/// did not make the same call. decode_value() also throws SessionError, if the value has more than
/// base::max_nesting levels or cannot be read.
std::string decode_text(std::string_view object, int from, ObjectKind kind = ObjectKind::text);
launch::Value decode_value(std::string_view object, int from, ObjectKind kind = ObjectKind::value);

/// Gathers what an interpreter has made of its objects, as all_gather() gathers texts.
std::vector<std::string> all_gather_bytes(const std::string& bytes, const GroupArgument& group);

}  // namespace accelmgr::distributed
