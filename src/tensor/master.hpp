// torch tensors over the session: how a model's parameters and buffers become the manifest, and views of
// master memory.
#pragma once

#include <span>
#include <vector>

#include "accelmgr/named_tensor.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::tensor {

/// What the model is made of. A tensor that occurs several times (tied weights) is listed once, under its
/// first name.
struct ModelTensors {
  session::Element element;
  std::vector<NamedTensor> parameters;  ///< In the order of manifest.tensors.
  std::vector<NamedTensor> buffers;     ///< In the order of manifest.buffers.
  session::Manifest manifest;           ///< tensors and buffers; not yet placed.
};

/// Throws ModelError: no parameters, dtypes that are neither all float32 nor all float64, a tensor that is
/// not on the CPU, dense, and a leaf.
ModelTensors describe(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

/// A view of `count` elements of master memory (parameters or gradients) from `first` on. It owns nothing.
at::Tensor flat_view(std::byte* memory, session::Element element, std::uint64_t first, std::uint64_t count);
/// A view of one tensor in master memory.
at::Tensor master_view(std::byte* memory, session::Element element, const session::TensorEntry& entry);
/// A view of one buffer in a copy of all buffers.
at::Tensor buffer_view(std::byte* copy, const session::BufferEntry& entry);

/// Points every parameter at its place in the master (`set_data`: it stays the same leaf). Throws ModelError
/// when the model is not the one that the manifest describes.
void bind_parameters(const ModelTensors& model, const session::Session& session,
                     const session::Manifest& manifest);
/// Throws ModelError that names the parameter whose storage is no longer the master's (the model replaced
/// it).
void check_aliases(const ModelTensors& model, const session::Session& session,
                   const session::Manifest& manifest);

/// Between a model's working buffers and a copy of them in the session.
void store_buffers(const ModelTensors& model, const session::Manifest& manifest, std::byte* copy);
void load_buffers(const ModelTensors& model, const session::Manifest& manifest, const std::byte* copy);

}  // namespace accelmgr::tensor
