// A model's description in the form that a session holds: each tensor once, with tied and overlapping
// parameters recognized.
#pragma once

#include <vector>

#include "engine/replica/replica.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::replica {

struct ModelTensors {
  std::vector<Tensor> parameters;  ///< In the order of manifest.tensors.
  std::vector<Tensor> buffers;     ///< In the order of manifest.buffers.
  bool has_values = true;          ///< As in Description.
  session::Manifest manifest;      ///< Tensors and buffers; offsets are not set yet.
};

/// Lists each tensor once. One that occurs several times (tied weights) has its first name; the others are
/// aliases. Different parameters over the same memory (tied by storage) share memory in the master too, and
/// each has its own gradient. Throws ModelError if there are no parameters, if one has a dtype that cannot be
/// trained and is not frozen, if two tensors have one name, or if parameters overlap in part.
ModelTensors tensors_of(const Description& description);

/// Throws ModelError unless the model is the one that the session's manifest describes.
void check_same(const ModelTensors& model, const session::Manifest& manifest);

/// The place of each parameter of the manifest, where the master's parameters begin at `parameters`.
std::vector<Place> places_of(std::byte* parameters, const session::Manifest& manifest);

/// Copies the model's values into the master's parameters, if it has them, and into state copy 0: buffers of
/// every rank, and of the result.
/// Requires: no runner has started.
void store_initial(const ModelTensors& model, session::Session& session, const session::Manifest& manifest);

/// Copy a model's working buffers to a copy of all buffers in the session, and back.
void store_buffers(const std::vector<Tensor>& buffers, const session::Manifest& manifest, std::byte* copy);
void load_buffers(const std::vector<Tensor>& buffers, const session::Manifest& manifest,
                  const std::byte* copy);

}  // namespace accelmgr::replica
