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

/// `non_persistent`: names of buffers that are not part of the state dict. Parameters over the same memory
/// that are not the same parameter (tied by storage) share it in the master too, and have a gradient each.
/// Throws ModelError: no parameters, dtypes that are neither all float32 nor all float64, a tensor that is
/// not on the CPU, dense, and a leaf, parameters that overlap in part.
ModelTensors describe(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                      const std::vector<std::string>& non_persistent = {});

/// A view of `count` elements of master memory (parameters or gradients) from `first` on. It owns nothing.
at::Tensor flat_view(std::byte* memory, session::Element element, std::uint64_t first, std::uint64_t count);
/// A view of one tensor in master memory.
at::Tensor master_view(std::byte* memory, session::Element element, const session::TensorEntry& entry);
/// A view of one parameter's values: as master_view() of the parameters, but for one that shares another's.
at::Tensor parameter_view(const session::Session& session, const session::Manifest& manifest,
                          std::size_t index);
/// A checkpoint has the values of every parameter in its own place, also of one that shares another's
/// memory: copies them there, and back.
void gather_shared_parameters(const session::Session& session, const session::Manifest& manifest);
void scatter_shared_parameters(const session::Session& session, const session::Manifest& manifest);
/// A view of one buffer in a copy of all buffers.
at::Tensor buffer_view(std::byte* copy, const session::BufferEntry& entry);

/// Points every parameter at its place in the master (`set_data`: it stays the same leaf). Throws ModelError
/// when the model is not the one that the manifest describes.
void bind_parameters(const ModelTensors& model, const session::Session& session,
                     const session::Manifest& manifest);
/// `current` is what the model says that its parameters are. Throws ModelError that names the one that is
/// another tensor than at the beginning, or whose memory is no longer the master's.
void check_aliases(const ModelTensors& model, const std::vector<NamedTensor>& current,
                   const session::Session& session, const session::Manifest& manifest);

/// Between a model's working buffers and a copy of them in the session.
void store_buffers(const ModelTensors& model, const session::Manifest& manifest, std::byte* copy);
void load_buffers(const ModelTensors& model, const session::Manifest& manifest, const std::byte* copy);

}  // namespace accelmgr::tensor
