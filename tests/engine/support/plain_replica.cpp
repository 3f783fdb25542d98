#include "engine/support/plain_replica.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "accelmgr/errors.hpp"
#include "engine/replica/generator_state.hpp"

namespace accelmgr::test {

void PlainReplica::bind(const replica::Binding& to) {
  binding_.emplace(to);
  auto& parameters = network_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].bind_values(to.places[i]);
    parameters[i].dtype = to.manifest.tensors[i].runner_dtype;
  }
}

void PlainReplica::run(std::span<const replica::Field> batch, double divisor) {
  const auto output = network_->forward(batch);
  add_to(totals_, output, divisor);
  binding_->progress.backward_begins();
  network_->backward(1 / divisor);
  auto& parameters = network_->parameters();
  for (std::size_t i = parameters.size(); i-- > 0;)
    if (parameters[i].used) binding_->gradients.capture(i, parameters[i].gradient.data());
}

void PlainReplica::save(const replica::State& to) { save_network(*network_, binding_->manifest, to); }

void PlainReplica::load(const replica::ConstState& from) {
  load_network(*network_, binding_->manifest, from);
}

void save_network(Network& network, const session::Manifest& manifest, const replica::State& to) {
  for (std::size_t i = 0; to.buffers != nullptr && i < manifest.buffers.size(); ++i)
    std::memcpy(to.buffers + manifest.buffers[i].offset, network.buffers()[i].values,
                manifest.buffers[i].bytes);
  replica::store_generator(std::as_bytes(std::span(&network.generator(), 1)), to.generator);
}

void load_network(Network& network, const session::Manifest& manifest, const replica::ConstState& from) {
  for (std::size_t i = 0; from.buffers != nullptr && i < manifest.buffers.size(); ++i)
    std::memcpy(network.buffers()[i].values, from.buffers + manifest.buffers[i].offset,
                manifest.buffers[i].bytes);
  static_assert(std::is_trivially_copyable_v<std::mt19937_64>);
  const auto generator = replica::stored_generator(from.generator);
  if (generator.empty()) return;  // No state was saved: the generator keeps its seed.
  if (generator.size() != sizeof(std::mt19937_64))
    throw ModelError("the state of the generator is none of a std::mt19937_64");
  std::memcpy(&network.generator(), generator.data(), generator.size());
}

void add_to(replica::Totals& totals, const Network::Output& output, double divisor) {
  totals.loss += output.loss / divisor;
  for (const auto& [name, value] : output.scalars) {
    auto sum = std::ranges::find(totals.scalars, name, [](const auto& scalar) { return scalar.first; });
    if (sum == totals.scalars.end()) sum = totals.scalars.insert(sum, {name, 0});
    sum->second += value / divisor;
  }
}

}  // namespace accelmgr::test
