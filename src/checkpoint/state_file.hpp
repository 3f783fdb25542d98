// state.json: what a checkpoint is, what the caller keeps in it, and the seals of its two other files. Its
// own seal is the checksum of the state's compact dump; and it is read only if it is, byte for byte, as it
// would be written: no byte can be flipped unseen.
//
//   {"checksum": "xxh3-128:...",
//    "state": {"format": "accelmgr checkpoint", "version": 1, "step": 123, "metric": 0.25 or null,
//              "files": {"model.safetensors": {"bytes": 456, "checksum": "xxh3-128:..."}, ...},
//              "run": {what the caller keeps}}}
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace accelmgr::checkpoint {

inline constexpr std::uint64_t format_version = 1;

/// What a file was when it was written.
struct Seal {
  std::uint64_t bytes = 0;
  std::string checksum;
};

struct State {
  std::uint64_t step = 0;
  std::optional<double> metric;
  Seal model;
  Seal training;
  nlohmann::json run;
};

/// The text of state.json. A metric that is not finite is none. Throws CheckpointError when `run` is no
/// object, or would come back from JSON as something else (binary values, numbers that are not finite, text
/// that is no UTF-8): it names the place.
std::string print_state(const State& state);

/// Throws CheckpointError, which names the file as `where`: torn, flipped, foreign, or of a newer program.
State parse_state(std::string_view text, const std::string& where);

/// state.json in the open directory `folder`, which is called `path`. Throws CheckpointError as parse_state()
/// does, SystemError when it cannot be read.
State read_state(int folder, const std::string& path);

}  // namespace accelmgr::checkpoint
