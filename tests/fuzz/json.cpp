// The input is text of JSON, and bytes of CBOR. What is accepted is not nested too deep to be used, and is
// the same when it is written and read again.
#include <cmath>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;
using nlohmann::json;

namespace {

/// The fields of an object as messages read them: by a type that may be another.
void use(const json& value) {
  (void)value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (!value.is_object()) return;
  const base::Fields fields(value, "the input");
  for (const auto& [name, entry] : value.items()) {
    const auto attempt = [&, field = name.c_str()](auto read) {
      try {
        if (fields.has(field)) read(field);
      } catch (const SessionError&) {
      }
    };
    attempt(
        [&](auto field) { fuzz::expect(fields.number<int>(field, 1, 24) <= 24, "a number in its range"); });
    attempt([&](auto field) { (void)fields.numbers<std::int64_t>(field, 0); });
    attempt([&](auto field) { (void)fields.number<std::uint64_t>(field); });
    attempt([&](auto field) { fuzz::expect(std::isfinite(fields.real(field)), "a finite number"); });
    attempt([&](auto field) { (void)fields.flag(field); });
    attempt([&](auto field) { (void)fields.text(field); });
    attempt([&](auto field) { (void)fields.texts(field); });
    attempt([&](auto field) { (void)fields.objects(field, 8); });
    attempt([&](auto field) { (void)fields.object(field); });
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    use(base::parse_json(fuzz::text_of(data, size), "the input"));
  } catch (const SessionError&) {
  }
  try {
    const auto value = base::parse_cbor(fuzz::text_of(data, size), "the input");
    use(value);
    const auto bytes = json::to_cbor(value);
    const auto again =
        json::to_cbor(base::parse_cbor(fuzz::text_of(bytes.data(), bytes.size()), "the output"));
    fuzz::expect(again == bytes, "what is written is read again");
  } catch (const SessionError&) {
  }
  return 0;
}
