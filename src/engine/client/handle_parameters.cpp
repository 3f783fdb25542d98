// What the host reads and writes in the session: parameters, gradients, moments, buffers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/ipc/memory.hpp"
#include "engine/client/handle_state.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/kernels.hpp"
#include "engine/session/sequence_lock.hpp"

namespace accelmgr::client {
namespace {

/// Finds the buffer that `value` replaces, by any of its names. Throws ModelError unless `value` fits it.
const session::BufferEntry& replaced_by(const Value& value, const session::Manifest& manifest) {
  const auto found = std::ranges::find_if(manifest.buffers, [&](const auto& entry) {
    return entry.name == value.name || std::ranges::find(entry.aliases, value.name) != entry.aliases.end();
  });
  if (found == manifest.buffers.end())
    throw ModelError(
        fmt::format("update_buffers: the model has no buffer '{}'; nothing was changed", value.name));
  if (found->dtype != value.dtype || found->shape != value.shape)
    throw ModelError(fmt::format(
        "update_buffers: '{}' is {} [{}], but the tensor passed for it is {} [{}]; nothing was changed",
        value.name, name_of(found->dtype), fmt::join(found->shape, ", "), name_of(value.dtype),
        fmt::join(value.shape, ", ")));
  return *found;
}

}  // namespace

void Handle::State::check_room(std::uint64_t more) const {
  const auto runners = __builtin_popcount(session->control().team.load());
  session::check_memory(session->used_bytes(runners) + more,
                        static_cast<std::uint64_t>(config.memory.limit_bytes), more);
}

void Handle::prepare_update(const session::Update& update) {
  for (const auto& tensor : manifest().tensors)
    if (tensor.shares >= 0 && tensor.group != session::Group::frozen)
      throw UsageError(fmt::format(
          "'{}' lies in the memory of another parameter, and both are trained: the session cannot "
          "update them; call the optimizer in the host",
          tensor.name));
  if (view().control().moments_used.load() != update.moments()) {
    clear_moments(update.moments());
    use_moments(update.moments());
  }
}

std::uint64_t Handle::updates(std::size_t parameter) const noexcept {
  return view().updated()[parameter].updates_before + session()->updates(session()->word().index)[parameter];
}

void Handle::set_update(std::size_t parameter, std::uint64_t group, std::uint64_t updates) noexcept {
  const std::uint64_t made = session()->updates(session()->word().index)[parameter];
  view().updated()[parameter] = {.group = group, .updates_before = updates - made};
}

void Handle::clear_moments(session::Moments moments) {
  const State::OpenUse use(*state_, "step");
  if (!session()->word().closed) throw UsageError("the state of the optimizer was set during a step");
  auto& control = view().control();
  const auto trained = session()->header().bytes.trained;
  const auto bytes_of = [&](session::Moments m) { return static_cast<std::uint64_t>(m) * trained; };
  const auto allocated = control.moments_allocated.load();
  if (moments > allocated) {
    const auto more = bytes_of(moments) - bytes_of(allocated);
    state_->check_room(more);
    session()->allocate_moments(moments);
    control.moments_allocated.store(moments);
  }
  control.moments_used.store(session::Moments::none);  // Until the caller has written all of them.
  session::best_kernels().zero(view().moments(), bytes_of(moments));
  for (std::size_t i = 0; i < manifest().tensors.size(); ++i) set_update(i, view().updated()[i].group, 0);
}

void Handle::use_moments(session::Moments moments) noexcept { view().control().moments_used.store(moments); }

bool Handle::is_updated() const noexcept {
  const auto& counters = session()->counters(session()->word().index);
  return counters.steps != 0 && counters.updated_step == counters.steps;
}

void Handle::zero_grad() {
  const State::DrivingUse use(*state_, "zero_grad");
  state_->stepper->zero_gradients();
  state_->overwrites = false;
}

std::vector<bool> Handle::touched() const {
  const State::Use use(state_->user, "touched");
  state_->service_drives();  // Or else it takes in what the service's steps have touched.
  return state_->stepper->touched().parameters();
}

void Handle::set_touched(std::span<const std::size_t> parameters, bool touched) {
  const State::DrivingUse use(*state_, "set_touched");
  for (const auto parameter : parameters) state_->stepper->touched().set(parameter, touched);
}

void Handle::frozen_written() { view().control().frozen_version.fetch_add(1); }

void Handle::unfreeze(std::span<const std::size_t> parameters) {
  const State::OpenUse use(*state_, "unfreeze");
  if (!session()->word().closed) throw UsageError("parameters may only be unfrozen between steps");
  std::vector<std::size_t> added;
  std::uint64_t bytes = 0, slab_bytes = 0;
  for (const auto i : parameters) {
    const auto& entry = manifest().tensors.at(i);
    if (session::has_gradient(*session(), manifest(), i)) continue;
    if (!entry.has_room())
      throw UsageError(fmt::format(
          "parameter '{}' is {}; it cannot be trained", entry.name,
          entry.is_expanded() ? "expanded (many of its elements are one in memory)" : name_of(entry.dtype)));
    added.push_back(i);
    bytes += entry.gradient_bytes();
    slab_bytes += entry.slab_bytes();
  }
  if (added.empty()) return;
  const auto team = session()->control().team.load();
  const auto runners = __builtin_popcount(team);
  const auto more = bytes + slab_bytes * static_cast<std::uint64_t>(runners);
  state_->check_room(more);
  for (const auto i : added) {
    const auto& entry = manifest().tensors[i];
    session()->allocate_room(entry.gradient, entry.gradient_bytes(), entry.slab, entry.slab_bytes(), team);
  }
  // The bytes are stored before the flags: a process looks at the flags only if there are bytes.
  view().control().unfrozen_bytes.fetch_add(bytes);
  view().control().unfrozen_slab_bytes.fetch_add(slab_bytes);
  for (const auto i : added) {
    const auto& entry = manifest().tensors[i];
    ipc::populate(view().gradients() + entry.gradient, entry.gradient_bytes(), 1);
    view().unfrozen()[i].store(1);
  }
}

// Copies the parameters to the snapshot: if this host dies in the write that follows, the next host can go
// back to them. Parameters that are half written are not copied: the snapshot keeps the last whole ones.
void Handle::State::keep_whole() noexcept {
  if (session->header().has_snapshot == 0 || half_written) return;
  auto& is_whole = view->control().snapshot_is_whole;
  is_whole.store(0);
  std::memcpy(view->snapshot(), view->parameters(), session->header().bytes.parameters);
  view->control().snapshot_applied_step.store(view->control().host_applied_step.load());
  is_whole.store(1);
}

void Handle::begin_writing(Written written) {
  const State::DrivingUse use(*state_, "writing");
  auto& version = view().control().parameter_version;
  if (session::is_written(version))
    throw UsageError("parameters are being written already; writing() does not nest");
  if (!session()->word().closed) throw UsageError("parameters may only be written between steps");
  state_->writing_since_ns = base::now_ns();
  state_->keep_whole();
  if (written == Written::all) view().control().frozen_version.fetch_add(1);
  session::begin_write(version);
  // Before the first write: what is applied in part is not to be applied again.
  view().control().host_applied_step.store(state_->steps());
}

void Handle::revert_parameters() {
  const State::OpenUse use(*state_, "revert_parameters");
  auto& control = view().control();
  if (!state_->half_written)
    throw UsageError("revert_parameters() was called, but no earlier host has left parameters half written");
  if (control.snapshot_is_whole.load() == 0)
    throw UsageError(
        "revert_parameters() was called, but the service keeps no whole version: start it with "
        "parameters.snapshot");
  if (is_writing() || !session()->word().closed)
    throw UsageError("parameters may only be written between steps, and not within writing()");
  // If this host dies here too, they are half written as before, and the snapshot is still whole.
  session::begin_write(control.parameter_version);
  std::memcpy(view().parameters(), view().snapshot(), session()->header().bytes.parameters);
  control.frozen_version.fetch_add(1);
  control.host_applied_step.store(control.snapshot_applied_step.load());
  control.writes.fetch_add(1);
  session::end_write(control.parameter_version);
  state_->half_written = false;
  state_->left = left_in(*session());
}

bool Handle::is_writing() const noexcept { return session::is_written(view().control().parameter_version); }

void Handle::end_writing(bool whole) noexcept {
  auto& control = view().control();
  if (whole) {
    control.writes.fetch_add(1);
    state_->half_written = false;
  }
  session::end_write(control.parameter_version);
  const session::SpanScope span(*state_->spans, session::Activity::write_parameters, state_->steps(),
                                state_->writing_since_ns);
}

std::vector<Value> Handle::buffers() const {
  const State::Use use(state_->user, "buffers");
  std::vector<Value> out;
  const auto* copy = session()->result_buffers(session()->word().index);
  for (const auto& entry : manifest().buffers)
    if (entry.of_model) out.push_back({entry.name, entry.dtype, entry.shape, copy + entry.offset});
  return out;
}

void Handle::update_buffers(std::span<const Value> values) {
  const State::DrivingUse use(*state_, "update_buffers");
  const auto& session = *state_->session;
  if (!session.word().closed) throw UsageError("buffers may only be written between steps");
  std::vector<const session::BufferEntry*> entries;
  for (const auto& value : values) entries.push_back(&replaced_by(value, manifest()));
  const auto valid = session.word().index;
  auto& version = view().control().buffer_version;
  session::begin_write(version);  // If this process dies now, the next host is told.
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& entry = *entries[i];
    if (entry.bytes == 0) continue;  // An empty value may have a null address.
    std::memcpy(view().result_buffers(valid) + entry.offset, values[i].data, entry.bytes);
    for (int rank = 0; rank < session.ranks(); ++rank)
      std::memcpy(view().buffers(valid, rank) + entry.offset, values[i].data, entry.bytes);
  }
  session::end_write(version);  // Runners load them when they begin the next attempt.
}

}  // namespace accelmgr::client
