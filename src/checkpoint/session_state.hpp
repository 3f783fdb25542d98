// What a session puts into a checkpoint, and takes back from one: all that training needs to go on bitwise,
// but for the host's optimizer.
//
//   model.safetensors     NAME                   parameters, and the master's buffers
//   training.safetensors  gradients/NAME         master gradients
//                         rank3/buffers/NAME     the buffers of each rank
//                         (further names)        the host's: its optimizer
//   state.json            counters, data cursor, source state, generators of all ranks
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/safetensors_layout.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::checkpoint {

/// A tensor that is to be saved, and where its bytes are.
struct TensorBytes {
  TensorDescription description;
  const std::byte* data = nullptr;
};

// Between steps: the word is closed. The pointers are into the session. Throw CheckpointError for a buffer
// whose dtype the format does not know.
std::vector<TensorBytes> model_tensors(const session::Session& session, const session::Manifest& manifest);
std::vector<TensorBytes> training_tensors(const session::Session& session, const session::Manifest& manifest);
nlohmann::json run_state(const session::Session& session);

/// What training_tensors() gives has such names; all others in the file are the host's.
bool is_of_session(const std::string& training_name);

/// Into a session nobody works on yet. A rank that the checkpoint does not know gets the master's buffers,
/// and a generator of its own. Throws CheckpointError when the checkpoint is that of another model, naming
/// the first tensor that differs.
void restore(const Checkpoint& checkpoint, const session::Session& session,
             const session::Manifest& manifest);

}  // namespace accelmgr::checkpoint
