// The input is the state of a checkpoint. It gets its right checksum, so that what is in it is read; it is
// also read as a whole file. One that is accepted is, byte for byte, what this program writes.
#include <span>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "engine/checkpoint/checksum.hpp"
#include "engine/checkpoint/state_file.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;
using nlohmann::json;

namespace {

void read(std::string_view text) {
  try {
    const auto state = checkpoint::parse_state(text, "input");
    fuzz::expect(checkpoint::print_state(state) == text, "what is accepted is what is written", text);
  } catch (const CheckpointError& error) {
    fuzz::expect(std::string_view(error.what()).starts_with("'input'"), "an error names the file",
                 error.what());
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto input = fuzz::text_of(data, size);
  read(input);
  try {
    const auto state = base::parse_json(input, "the state");
    const auto text = state.dump();
    const auto checksum = checkpoint::checksum_of(std::as_bytes(std::span(text)));
    read(json{{"checksum", checksum}, {"state", state}}.dump(1) + '\n');
  } catch (const SessionError&) {
  }
  return 0;
}
