// Perceptrons that whole systems train, in the host's memory and on the transport for devices,
// and elements for them.
#pragma once

#include "accelmgr/config.hpp"
#include "engine/support/perceptron.hpp"

namespace accelmgr::test {

/// The registered names of the models.
inline constexpr const char* perceptron = "perceptron";
inline constexpr const char* perceptron_on_fake_device = "perceptron_on_fake_device";

/// A config with runners of one thread each that train the perceptron on endless elements ("numbered":
/// "input" and "index"). `data.elements` and `data.epochs` set an end. The time limits make a test fail
/// before ctest ends it.
Config perceptron_config(const PerceptronShape& shape = {.inputs = 4, .hidden = 6},
                         const char* kind = perceptron);

}  // namespace accelmgr::test
