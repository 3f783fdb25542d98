#include "perceptrons.hpp"

#include <cmath>
#include <cstring>

#include "engine/support/fake_device_replica.hpp"
#include "engine/support/plain_replica.hpp"
#include "support.hpp"
#include "table_source.hpp"

namespace accelmgr::test {
namespace {

std::int64_t number(const Config& config, const char* key) {
  return std::stoll(config.model.options.at(key));
}

PerceptronShape shape_of(const Config& config) {
  return {.dtype = number(config, "float64") != 0 ? DType::float64 : DType::float32,
          .inputs = number(config, "inputs"),
          .hidden = number(config, "hidden"),
          .layers = static_cast<int>(number(config, "layers")),
          .dropout = std::stod(config.model.options.at("dropout")),
          .tie = static_cast<Tie>(number(config, "tie")),
          .seed = config.seed_base,
          .gradient_limit = std::stod(config.model.options.at("gradient_limit"))};
}

const RegisteredReplica plain(perceptron, [](const Config& config, replica::Role) {
  return std::make_unique<PlainReplica>(make_perceptron(shape_of(config)));
});
const RegisteredReplica fake_device(perceptron_on_fake_device, [](const Config& config, replica::Role) {
  return std::make_unique<FakeDeviceReplica>(make_perceptron(shape_of(config)));
});

template <class T>
std::vector<std::byte> sines(std::size_t count) {
  std::vector<std::byte> bytes(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) {
    const T value = T(std::sin(1.7 * double(i)));
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

const RegisteredData numbered("numbered", [](const Config& config) {
  const auto shape = shape_of(config);
  const auto elements = config.data.elements > 0 ? static_cast<std::size_t>(config.data.elements) : 64;
  const auto count = elements * static_cast<std::size_t>(shape.inputs);
  auto input = shape.dtype == DType::float64 ? sines<double>(count) : sines<float>(count);
  return table_source(
      {{{"input", shape.dtype, {shape.inputs}}, std::move(input)}, numbers("index", elements)},
      config.data.epochs, 0);
});

}  // namespace

Config perceptron_config(const PerceptronShape& shape, const char* kind) {
  Config config;
  config.batch_size_per_device = 3;
  config.start_timeout = 120;
  config.step_timeout = 100;
  config.runners.threads = 1;
  config.model.kind = kind;
  config.model.options = {{"float64", shape.dtype == DType::float64 ? "1" : "0"},
                          {"inputs", std::to_string(shape.inputs)},
                          {"hidden", std::to_string(shape.hidden)},
                          {"layers", std::to_string(shape.layers)},
                          {"dropout", std::to_string(shape.dropout)},
                          {"tie", std::to_string(static_cast<int>(shape.tie))},
                          {"gradient_limit", std::to_string(shape.gradient_limit)}};
  config.data.kind = "numbered";
  return config;
}

}  // namespace accelmgr::test
