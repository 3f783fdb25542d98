// What a session writes into a checkpoint and restores from it: all that training needs to go on bitwise,
// except for the host's optimizer.
//
//   model.safetensors     NAME                   parameters, and the master's buffers
//   training.safetensors  gradients/NAME         master gradients
//                         rank3/buffers/NAME     the buffers of each rank
//                         (other names)          tensors of the host: its optimizer
//   state.json            counters, data cursor, state of the source, generators of all ranks
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/safetensors_layout.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::checkpoint {

/// A tensor to be saved, and where it lies.
struct TensorBytes {
  TensorDescription description;
  const std::byte* data = nullptr;
  std::vector<std::int64_t> strides{};  ///< In elements. Empty: row-major, as it is in the file.

  /// Copy the tensor to its place in a file, and back.
  void store(std::byte* file) const;
  void load(const std::byte* file) const;
};

// Pointers that these return point into the session. They throw CheckpointError for a buffer whose dtype the
// format does not know.
// Requires: the step word is closed, as between steps.
std::vector<TensorBytes> model_tensors(const session::Session& session, const session::Manifest& manifest);
std::vector<TensorBytes> training_tensors(const session::Session& session, const session::Manifest& manifest);
nlohmann::json run_state(const session::Session& session);

/// Restores into a session what run_state() returned. Throws CheckpointError, or json::exception if `run` has
/// another form.
/// Requires: no process works on the session yet.
void restore_run(const nlohmann::json& run, session::Session& session);

/// Whether a name is one of training_tensors(). All other tensors in the file are the host's.
bool is_of_session(const std::string& training_name);

/// Restores a session. A rank that the checkpoint does not have gets the master's buffers and keeps its own
/// generator. Throws CheckpointError, which names the first tensor that differs, when the checkpoint is of
/// another model.
/// Requires: no process works on the session yet.
void restore(const Checkpoint& checkpoint, session::Session& session, const session::Manifest& manifest);

}  // namespace accelmgr::checkpoint
