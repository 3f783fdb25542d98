// Random data that the built-in models can learn: for tests, benchmarks, and a first run without files.
#pragma once

#include <cstddef>
#include <memory>

#include "accelmgr/batch_source.hpp"

namespace accelmgr::data {

/// How many elements held_out() of synthetic data gives.
inline constexpr std::uint64_t synthetic_held_out_elements = 256;

/// Makes data for `config.model.kind`:
///   mlp      "input" float32 [input_size], "target" int64 []: a class. The mean of each class is a random
///            point, with unit noise around it.
///   convnet  "input" float32 [input_channels, image_size, image_size], "target" int64 []: likewise.
///   gpt      "input" int64 [T], "target" int64 [T], T = data.sequence_length: a Markov chain in which every
///            token has four successors with probabilities 1/2, 1/4, 1/8 and 1/8 (entropy 1.21 nats if the
///            four differ).
/// Element i of an epoch depends on (`data.seed`, i) alone. An epoch has `data.elements` elements, and there
/// are `data.epochs` epochs; if either is 0 the data has no end. held_out() gives elements of the same
/// classes or chain that training never draws.
///
/// Throws ConfigError for another model, sizes that are not positive, or a sequence longer than the context
/// of the gpt.
std::unique_ptr<BatchSource> synthetic_source(const Config& config);

}  // namespace accelmgr::data
