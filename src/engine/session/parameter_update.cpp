#include "engine/session/parameter_update.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/fault_point.hpp"

namespace accelmgr::session {
namespace {

constexpr double clip_epsilon = 1e-6;  // As in torch's clip_grad_norm_().

std::uint64_t chunk_elements(Element type) noexcept { return chunk_bytes / bytes_of(type); }

SgdFactors sgd_factors(const Update& update, double scale, bool decays) noexcept {
  return {.gradient = scale,
          .decay = decays ? update.weight_decay : 0,
          .momentum = update.momentum,
          .step = update.learning_rate,
          .nesterov = update.nesterov != 0};
}

AdamFactors adam_factors(const Update& update, double scale, bool decays) noexcept {
  const double decay = decays ? update.weight_decay : 0;
  const bool decoupled = update.kind == Update::Kind::adamw;
  const auto number = double(update.number);
  return {.gradient = scale,
          .decay = decoupled ? 0 : decay,
          .shrink = decoupled ? 1 - update.learning_rate * decay : 1,
          .first = 1 - update.beta1,
          .beta2 = update.beta2,
          .step = update.learning_rate / (1 - std::pow(update.beta1, number)),
          .correction = std::sqrt(1 - std::pow(update.beta2, number)),
          .epsilon = update.epsilon};
}

double squares_of(const Session& session) noexcept {
  const auto& request = session.control().request;
  double sum = 0;
  for (int rank = 0; rank < session.ranks(); ++rank)
    if ((request.participants >> rank & 1) != 0) sum += session.record(rank).squares.load();
  return sum;
}

}  // namespace

double gradient_norm(const Session& session) noexcept {
  const auto& update = session.control().request.update;
  return update.clip_norm > 0 ? std::sqrt(squares_of(session)) / update.divisor : 0;
}

ParameterUpdate::ParameterUpdate(const View& view, const Manifest& manifest)
    : session_(view.memory_), parameters_(session_->parameters()) {
  for (const auto& tensor : manifest.tensors) {
    if (tensor.group == Group::frozen || tensor.count == 0) continue;
    places_.push_back({.chunk = 0,
                       .parameter = manifest.values_of(tensor),
                       .gradient = tensor.gradient,
                       .elements = tensor.elements(),
                       .type = *element_of(tensor.dtype),
                       .gradient_type = tensor.types.master,
                       .decays = tensor.group == Group::decay});
  }
  std::ranges::sort(places_, {}, &Place::parameter);
  for (auto& place : places_) {
    const auto each = chunk_elements(place.type);
    place.chunk = chunks_;
    chunks_ += (place.elements + each - 1) / each;
  }
}

ParameterUpdate::Part ParameterUpdate::part_of(int rank, const ChunkRange& slice, int index,
                                               int parts) const noexcept {
  const auto chunks = session::slice(slice.end - slice.begin, index, parts);
  return {.chunks = {slice.begin + chunks.begin, slice.begin + chunks.end},
          .cursor = session_->record(rank).update_cursors[index].bits,
          .image = session_->undo(rank, index)};
}

void ParameterUpdate::compute(const Numbers& numbers, const Place& place, std::uint64_t element,
                              std::uint64_t count, std::byte* image) const noexcept {
  const auto at = place.parameter + element * bytes_of(place.type);
  const auto* first = session_->moments() + at;
  const UpdateArrays arrays{
      .gradient = session_->gradients() + place.gradient + element * bytes_of(place.gradient_type),
      .parameter = std::as_const(*session_).parameters() + at,
      .first = first,
      .second = first + session_->header().bytes.trained,
      .new_parameter = image,
      .new_first = image + chunk_bytes,
      .new_second = image + 2 * chunk_bytes,
      .count = count};
  const auto& update = numbers.update;
  if (update.kind == Update::Kind::sgd)
    best_kernels().sgd(arrays, sgd_factors(update, numbers.scale, place.decays), place.type,
                       place.gradient_type);
  else
    best_kernels().adam(arrays, adam_factors(update, numbers.scale, place.decays), place.type,
                        place.gradient_type);
}

void ParameterUpdate::copy(const Numbers& numbers, const Place& place, std::uint64_t element,
                           std::uint64_t count, const std::byte* image) const noexcept {
  const auto at = place.parameter + element * bytes_of(place.type);
  const auto bytes = count * bytes_of(place.type);
  auto* moments = session_->moments() + at;
  const auto held = numbers.update.moments();
  std::memcpy(parameters_ + at, image, bytes);
  if (held != Moments::none) std::memcpy(moments, image + chunk_bytes, bytes);
  if (held == Moments::both)
    std::memcpy(moments + session_->header().bytes.trained, image + 2 * chunk_bytes, bytes);
}

void ParameterUpdate::finish_part(std::uint64_t attempt, const Numbers& numbers,
                                  const Part& part) const noexcept {
  auto cursor = decode_cursor(part.cursor.load());
  if (cursor.attempt != attempt) cursor = {.attempt = attempt};
  auto chunk = part.chunks.begin + cursor.chunk;
  if (chunk >= part.chunks.end) return;
  auto place = std::ranges::upper_bound(places_, chunk, {}, &Place::chunk) - 1;
  for (; chunk < part.chunks.end; ++chunk) {
    if (place + 1 != places_.end() && chunk == (place + 1)->chunk) ++place;
    const auto each = chunk_elements(place->type);
    const auto element = (chunk - place->chunk) * each;
    const auto count = std::min(each, place->elements - element);
    if (!std::exchange(cursor.in_flight, false)) {
      compute(numbers, *place, element, count, part.image);
      base::fault_point(base::FaultPhase::update_saved);
      move_cursor(part.cursor, {attempt, chunk - part.chunks.begin, true});
    }
    base::fault_point(base::FaultPhase::update_in_flight);
    copy(numbers, *place, element, count, part.image);
    base::fault_point(base::FaultPhase::updated);
    move_cursor(part.cursor, {attempt, chunk + 1 - part.chunks.begin, false});
  }
}

void ParameterUpdate::finish_slice(int rank, std::uint64_t attempt, base::Helpers* helpers) const noexcept {
  auto& last = session_->record(rank).update_cursors[0].bits;
  const auto cursor = decode_cursor(last.load());
  if (cursor.attempt == attempt && cursor.chunk == cursor_finished) return;
  const auto& request = session_->control().request;
  Numbers numbers{.update = request.update, .scale = 1 / request.update.divisor};
  if (request.update.clip_norm > 0) {
    const double excess = (gradient_norm(*session_) + clip_epsilon) / request.update.clip_norm;
    if (!(excess <= 1))
      numbers.scale /= excess;  // Also for NaN, which must reach the parameters as in torch.
  }
  const auto slice = slice_of_rank(rank, request.participants, chunks_);
  const int parts = parts_in(slice);
  const auto finish = [&](int part) { finish_part(attempt, numbers, part_of(rank, slice, part, parts)); };
  if (helpers != nullptr && parts >= helped_from_parts)
    helpers->for_each(parts, finish);
  else
    for (int part = 0; part < parts; ++part) finish(part);
  last.store(encode(Cursor{attempt, cursor_finished, false}));
}

}  // namespace accelmgr::session
