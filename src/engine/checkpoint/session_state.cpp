#include "engine/checkpoint/session_state.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/power_of_two.hpp"
#include "engine/checkpoint/base64.hpp"
#include "engine/checkpoint/safetensors_header.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::checkpoint {
namespace {

using nlohmann::json;

std::string dtype_of(DType dtype) { return std::string(name_in_file(dtype)); }

TensorBytes parameter(const session::Manifest& manifest, const session::TensorEntry& entry,
                      const std::byte* parameters) {
  const auto dtype = dtype_of(entry.dtype);
  return {{entry.name, dtype, entry.shape, tensor_bytes(entry.name, dtype, entry.shape), entry.aliases},
          parameters + manifest.values_of(entry),
          entry.value_strides()};
}

TensorBytes gradient(const session::TensorEntry& entry, const std::byte* gradients) {
  return {
      {"gradients/" + entry.name, dtype_of(entry.gradient_dtype()), entry.shape, entry.gradient_bytes(), {}},
      gradients + entry.gradient,
      entry.gradient_strides()};
}

/// The gradients that the master has.
std::vector<TensorBytes> gradients_of(const session::Session& session, const session::Manifest& manifest) {
  std::vector<TensorBytes> out;
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (session::has_gradient(session, manifest, i))
      out.push_back(gradient(manifest.tensors[i], session.gradients()));
  return out;
}

TensorBytes tensor(const std::string& prefix, const session::BufferEntry& entry, const std::byte* copy,
                   bool aliases) {
  return {{prefix + entry.name, dtype_of(entry.dtype), entry.shape, entry.bytes,
           aliases ? entry.aliases : std::vector<std::string>{}},
          copy + entry.offset};
}

std::string rank_prefix(int rank) { return fmt::format("rank{}/buffers/", rank); }

/// Copies a tensor of the file to where `to` describes it.
void load(const SafetensorsFile& file, const std::filesystem::path& path, const TensorBytes& to) {
  const auto& wanted = to.description;
  if (!file.contains(wanted.name))
    throw CheckpointError(
        fmt::format("{}: there is no '{}', which this model has: it is a checkpoint of another model",
                    path.string(), wanted.name));
  const auto& found = file.tensor(wanted.name);
  if (found.dtype != wanted.dtype || found.shape != wanted.shape)
    throw CheckpointError(
        fmt::format("{}: '{}' is {} [{}], but {} [{}] in this model: it is a checkpoint of another "
                    "model",
                    path.string(), wanted.name, found.dtype, fmt::join(found.shape, ", "), wanted.dtype,
                    fmt::join(wanted.shape, ", ")));
  to.load(found.bytes.data());
}

std::vector<TensorBytes> buffers_of_rank(const session::Session& session, const session::Manifest& manifest,
                                         int rank) {
  std::vector<TensorBytes> out;
  const auto* copy = session.buffers(session.word().index, rank);
  for (const auto& buffer : manifest.buffers)
    if (buffer.of_model) out.push_back(tensor(rank_prefix(rank), buffer, copy, /*aliases=*/false));
  return out;
}

void restore_counters(const json& run, session::Session& session) {
  auto& counters = session.counters(session.word().index);
  counters.steps = run.at("steps").get<std::uint64_t>();
  counters.samples = run.at("samples").get<std::uint64_t>();
  counters.skips = run.at("skips").get<std::uint64_t>();
  counters.elements = run.at("elements").get<std::uint64_t>();
  counters.participants = run.at("participants").get<std::uint64_t>();
  session.control().zeroed_step.store(
      run.value("zeroed_step", std::uint64_t{counters.steps}));  // Earlier builds saved none.
  session.control().host_applied_step.store(run.value("applied_step", std::uint64_t{counters.steps}));
  const auto& samples = run.at("rank_samples");
  for (std::size_t rank = 0; rank < samples.size() && rank < session::max_ranks; ++rank)
    counters.rank_samples[rank] = samples[rank].get<std::uint64_t>();
  if (!run.contains("loss_scale")) return;  // Earlier builds saved none.
  const double scale = run["loss_scale"].at("scale");
  if (scale != 0 && !base::is_power_of_two(scale))
    throw CheckpointError(fmt::format("the loss scale is {}; it must be a power of two", scale));
  counters.loss_scale = {scale, run["loss_scale"].at("good_steps")};
}

void restore_source(const json& source, session::Session& session) {
  auto& to = session.source_state();
  const auto bytes = decode_base64(source.at("state").get<std::string>());
  if (bytes.size() > sizeof to.state)
    throw CheckpointError(fmt::format("the state of the data source has {} bytes; at most {} fit",
                                      bytes.size(), sizeof to.state));
  to.element = source.at("element");
  to.bytes = bytes.size();
  // Not memcpy: without a state the vector is empty and its data() may be null.
  std::ranges::copy(bytes, reinterpret_cast<std::byte*>(to.state));
}

void restore_generators(const json& generators, session::Session& session) {
  const auto index = session.word().index;
  for (std::size_t rank = 0; rank < generators.size() && static_cast<int>(rank) < session.ranks(); ++rank) {
    const auto bytes = decode_base64(generators[rank].get<std::string>());
    if (bytes.size() != session::generator_bytes)
      throw CheckpointError(fmt::format("the generator state of rank {} has {} bytes instead of {}", rank,
                                        bytes.size(), session::generator_bytes));
    std::memcpy(session.generator(index, static_cast<int>(rank)), bytes.data(), bytes.size());
  }
}

}  // namespace

void TensorBytes::store(std::byte* file) const {
  const auto& [name, dtype, shape, bytes, aliases] = description;
  if (strides.empty())
    std::memcpy(file, data, bytes);
  else
    session::copy_strided(file, session::dense_strides(shape), data, strides, shape,
                          dtype_bytes(dtype).value());
}

void TensorBytes::load(const std::byte* file) const {
  const auto& [name, dtype, shape, bytes, aliases] = description;
  auto* const to = const_cast<std::byte*>(data);
  if (strides.empty())
    std::memcpy(to, file, bytes);
  else
    session::copy_strided(to, strides, file, session::dense_strides(shape), shape,
                          dtype_bytes(dtype).value());
}

std::vector<TensorBytes> model_tensors(const session::Session& session, const session::Manifest& manifest) {
  std::vector<TensorBytes> out;
  for (const auto& entry : manifest.tensors)
    if (entry.persistent) out.push_back(parameter(manifest, entry, session.parameters()));
  for (const auto& buffer : manifest.buffers)
    if (buffer.persistent)
      out.push_back(tensor("", buffer, session.result_buffers(session.word().index), /*aliases=*/true));
  return out;
}

std::vector<TensorBytes> training_tensors(const session::Session& session,
                                          const session::Manifest& manifest) {
  auto out = gradients_of(session, manifest);
  for (int rank = 0; rank < session.ranks(); ++rank) {
    auto buffers = buffers_of_rank(session, manifest, rank);
    out.insert(out.end(), buffers.begin(), buffers.end());
  }
  return out;
}

bool is_of_session(const std::string& name) {
  if (name.starts_with("gradients/")) return true;
  const auto slash = name.find('/');
  return name.starts_with("rank") && slash != std::string::npos &&
         name.substr(slash).starts_with("/buffers/");
}

json run_state(const session::Session& session) {
  const auto index = session.word().index;
  const auto& counters = session.counters(index);
  const auto& source = session.source_state();
  json generators = json::array(), samples = json::array();
  for (int rank = 0; rank < session.ranks(); ++rank) {
    generators.push_back(encode_base64({session.generator(index, rank), session::generator_bytes}));
    samples.push_back(std::uint64_t{counters.rank_samples[rank]});
  }
  return {
      {"steps", std::uint64_t{counters.steps}},
      {"samples", std::uint64_t{counters.samples}},
      {"skips", std::uint64_t{counters.skips}},
      {"elements", std::uint64_t{counters.elements}},
      {"participants", std::uint64_t{counters.participants}},
      {"zeroed_step", session.control().zeroed_step.load()},
      {"applied_step", session::applied_step(session)},
      {"rank_samples", samples},
      {"loss_scale", {{"scale", counters.loss_scale.scale}, {"good_steps", counters.loss_scale.good_steps}}},
      {"source",
       {{"element", source.element},
        {"state", encode_base64(std::as_bytes(std::span(source.state, source.bytes)))}}},
      {"generators", generators}};
}

void restore_run(const json& run, session::Session& session) {
  restore_counters(run, session);
  restore_source(run.at("source"), session);
  restore_generators(run.at("generators"), session);
}

void restore(const Checkpoint& checkpoint, session::Session& session, const session::Manifest& manifest) {
  const auto model_path = checkpoint.path / "model.safetensors";
  const auto training_path = checkpoint.path / "training.safetensors";
  for (const auto& to : model_tensors(session, manifest)) load(checkpoint.model, model_path, to);
  // A parameter that was frozen when the checkpoint was written had no gradient.
  for (const auto& to : gradients_of(session, manifest))
    if (checkpoint.training.contains(to.description.name)) load(checkpoint.training, training_path, to);
  // What a host keeps of its buffers, under a name as "<forms>", is skipped if its shape differs because
  // other buffers had changed when the checkpoint was written: the host notices, and starts again with room
  // for them.
  const auto is_there = [&](const TensorBytes& to) {
    const auto& name = to.description.name;
    if (!checkpoint.training.contains(name)) return false;
    return name.find("/<") == std::string::npos ||
           checkpoint.training.tensor(name).shape == to.description.shape;
  };
  const auto index = session.word().index;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    std::memcpy(session.buffers(index, rank), session.result_buffers(index), session.header().buffer_bytes);
    for (const auto& to : buffers_of_rank(session, manifest, rank))
      if (is_there(to)) load(checkpoint.training, training_path, to);
  }
  for (const auto& buffer : manifest.buffers)  // Not in the state dict: taken from rank 0.
    if (!buffer.persistent)
      std::memcpy(session.result_buffers(index) + buffer.offset, session.buffers(index, 0) + buffer.offset,
                  buffer.bytes);
  try {
    restore_run(checkpoint.state.at("session"), session);
  } catch (const json::exception& error) {
    throw CheckpointError(fmt::format("{}: it does not hold the state of an accelmgr session: {}",
                                      (checkpoint.path / "state.json").string(), error.what()));
  }
}

}  // namespace accelmgr::checkpoint
