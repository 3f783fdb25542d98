// Texts and values as they travel: one byte that says which it is, then the text, or CBOR.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/launch.hpp"

namespace accelmgr::distributed {

enum class ObjectKind : char { text = 't', value = 'v', broadcast_header = 'h' };

std::string encode_text(std::string_view text);
std::string encode_value(const launch::Value& value, ObjectKind kind = ObjectKind::value);

/// Throws CollectiveError{mismatch}, which names `from`, for an object of another kind: the ranks did not
/// make the same call.
std::string decode_text(std::string_view object, int from);
launch::Value decode_value(std::string_view object, int from, ObjectKind kind = ObjectKind::value);

}  // namespace accelmgr::distributed
