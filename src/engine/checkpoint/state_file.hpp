// state.json: step and metric of a checkpoint, the caller's state, and the seals of its two other files. Its
// own seal is the checksum of the state's compact dump. It is read only if it is, byte for byte, what this
// program would write: so every flipped byte is noticed.
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

/// Size and checksum of a file when it was written.
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

/// Returns the text of state.json. A metric that is not finite is written as null. Throws CheckpointError,
/// which names the place, when `run` is no object or would not survive JSON (binary values, numbers that are
/// not finite, text that is not UTF-8).
std::string print_state(const State& state);

/// Throws CheckpointError, which names the file as `where`, for a file that is truncated, damaged, of another
/// kind, or of a newer program.
State parse_state(std::string_view text, const std::string& where);

/// Reads state.json in the open directory `folder`, whose path is `path`. Throws CheckpointError as
/// parse_state() does, and SystemError when the file cannot be read.
State read_state(int folder, const std::string& path);
/// As read_state(), for the open file `fd`, which errors call `where`.
State read_state_file(int fd, const std::string& where);

}  // namespace accelmgr::checkpoint
