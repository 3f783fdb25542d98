// The input is the manifest of a session. All of a session whose manifest is accepted can be used.
#include "accelmgr/errors.hpp"
#include "engine/session/used_session.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto manifest = session::some_manifest();
  static auto made = session::session_of(manifest, 2);
  const std::uint64_t length = size;
  const auto region = made.manifest();
  if (sizeof length + size > region.size()) return 0;
  std::memcpy(region.data(), &length, sizeof length);
  if (size > 0) std::memcpy(region.data() + sizeof length, data, size);
  try {
    session::use(made);
  } catch (const SessionError& error) {
    ++fuzz::refused;
    fuzz::expect(std::string_view(error.what()).starts_with("the manifest of the session"),
                 "an error names what is wrong", error.what());
  }
  return 0;
}
