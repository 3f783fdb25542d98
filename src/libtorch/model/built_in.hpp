// Factories of the built-in models. Each reads its part of Config.model. Initial values come from torch's
// default generator; parameters have torch's default dtype.
#pragma once

#include <memory>

#include "accelmgr/model.hpp"

namespace accelmgr::model {

/// Linear layers and GELU, cross entropy. Batch: `input` floating point [input_size], `target` int64 scalar.
std::unique_ptr<Model> make_mlp(const Config& config);
/// Three blocks of convolution, BatchNorm and ReLU, the mean over the image, a linear layer, cross entropy.
/// Batch: `input` floating point [channels, height, width], `target` int64 scalar.
std::unique_ptr<Model> make_convnet(const Config& config);
/// A decoder-only transformer, cross entropy of the next token. Batch: `input` and `target` int64 [length].
std::unique_ptr<Model> make_gpt(const Config& config);
/// Loads Config.model.file, which torch.jit.save() wrote. Its forward() takes the fields of the batch by
/// name.
std::unique_ptr<Model> make_torchscript(const Config& config);

}  // namespace accelmgr::model
