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

SgdFactors sgd_factors(const UpdateGroup& group, double scale) noexcept {
  return {.gradient = scale,
          .decay = group.weight_decay,
          .momentum = group.momentum,
          .step = group.learning_rate,
          .nesterov = group.nesterov != 0};
}

/// `number` counts updates from 1.
AdamFactors adam_factors(const UpdateGroup& group, double scale, bool decoupled,
                         std::uint64_t number) noexcept {
  return {.gradient = scale,
          .decay = decoupled ? 0 : group.weight_decay,
          .shrink = decoupled ? 1 - group.learning_rate * group.weight_decay : 1,
          .first = 1 - group.beta1,
          .beta2 = group.beta2,
          .step = group.learning_rate / (1 - std::pow(group.beta1, double(number))),
          .correction = std::sqrt(1 - std::pow(group.beta2, double(number))),
          .epsilon = group.epsilon};
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
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const auto& tensor = manifest.tensors[i];
    if (tensor.group == Group::frozen || tensor.count == 0) continue;
    places_.push_back({.tensor = i,
                       .chunk = 0,
                       .parameter = manifest.values_of(tensor),
                       .gradient = tensor.gradient,
                       .elements = tensor.elements(),
                       .type = *element_of(tensor.dtype),
                       .gradient_type = tensor.types.master});
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
  const auto chunks = even_range(slice.end - slice.begin, index, parts);
  return {.chunks = {slice.begin + chunks.begin, slice.begin + chunks.end},
          .cursor = session_->record(rank).update_cursors[index].bits,
          .image = session_->undo(rank, index)};
}

ParameterUpdate::Numbers ParameterUpdate::numbers_of(const Place& place, std::uint64_t attempt,
                                                     double scale) const noexcept {
  Numbers numbers{};
  numbers.updates = updates_tensor(*session_, place.tensor, attempt);
  if (!numbers.updates) return numbers;
  const auto& update = session_->control().request.update;
  const auto& tensor = std::as_const(*session_).updated()[place.tensor];
  auto group = update.groups[tensor.group % max_update_groups];
  // The counters of the attempt were written when the first slice was reduced.
  const auto number = tensor.updates_before + session_->updates(session_->word().index ^ 1)[place.tensor];
  group.learning_rate = update.schedule.rate(group.learning_rate, static_cast<std::int64_t>(number) - 1);
  if (update.kind == Update::Kind::sgd) {
    numbers.sgd = sgd_factors(group, scale);
    numbers.moments = group.momentum != 0 ? Moments::first : Moments::none;
    return numbers;
  }
  numbers.adam = adam_factors(group, scale, update.kind == Update::Kind::adamw, number);
  numbers.moments = Moments::both;
  return numbers;
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
  if (numbers.moments == Moments::both)
    best_kernels().adam(arrays, numbers.adam, place.type, place.gradient_type);
  else
    best_kernels().sgd(arrays, numbers.sgd, place.type, place.gradient_type);
}

void ParameterUpdate::copy(Moments moments, const Place& place, std::uint64_t element, std::uint64_t count,
                           const std::byte* image) const noexcept {
  const auto at = place.parameter + element * bytes_of(place.type);
  const auto bytes = count * bytes_of(place.type);
  auto* first = session_->moments() + at;
  std::memcpy(parameters_ + at, image, bytes);
  if (moments != Moments::none) std::memcpy(first, image + chunk_bytes, bytes);
  if (moments == Moments::both)
    std::memcpy(first + session_->header().bytes.trained, image + 2 * chunk_bytes, bytes);
}

void ParameterUpdate::finish_part(std::uint64_t attempt, double scale, const Part& part) const noexcept {
  auto cursor = decode_cursor(part.cursor.load());
  if (cursor.attempt != attempt) cursor = {.attempt = attempt};
  const auto begin = part.chunks.begin, end = part.chunks.end;
  auto chunk = begin + cursor.chunk;
  if (chunk >= end) return;
  auto place = std::ranges::upper_bound(places_, chunk, {}, &Place::chunk) - 1;
  for (; chunk < end; ++place) {
    const auto numbers = numbers_of(*place, attempt, scale);
    const auto each = chunk_elements(place->type);
    const auto last = std::min(end, place->chunk + (place->elements + each - 1) / each);
    for (; chunk < last; ++chunk) {
      const auto element = (chunk - place->chunk) * each;
      const auto count = std::min(each, place->elements - element);
      if (!numbers.updates) continue;
      if (!std::exchange(cursor.in_flight, false)) {
        compute(numbers, *place, element, count, part.image);
        base::fault_point(base::FaultPhase::update_saved);
        move_cursor(part.cursor, {attempt, chunk - begin, true});
      }
      base::fault_point(base::FaultPhase::update_in_flight);
      copy(numbers.moments, *place, element, count, part.image);
      base::fault_point(base::FaultPhase::updated);
      move_cursor(part.cursor, {attempt, chunk + 1 - begin, false});
    }
  }
}

void ParameterUpdate::finish_slice(int rank, std::uint64_t attempt, base::Helpers* helpers) const noexcept {
  auto& last = session_->record(rank).update_cursors[0].bits;
  const auto cursor = decode_cursor(last.load());
  if (cursor.attempt == attempt && cursor.chunk == cursor_finished) return;
  const auto& request = session_->control().request;
  double scale = 1 / request.update.divisor;
  if (request.update.clip_norm > 0) {
    const double excess = (gradient_norm(*session_) + clip_epsilon) / request.update.clip_norm;
    if (!(excess <= 1)) scale /= excess;  // Also for NaN, which must reach the parameters as in torch.
  }
  const auto slice = slice_of_rank(rank, request.participants, chunks_);
  const int parts = parts_in(slice);
  const auto finish = [&](int part) { finish_part(attempt, scale, part_of(rank, slice, part, parts)); };
  if (helpers != nullptr && parts >= helped_from_parts)
    helpers->for_each(parts, finish);
  else
    for (int part = 0; part < parts; ++part) finish(part);
  last.store(encode(Cursor{attempt, cursor_finished, false}));
}

}  // namespace accelmgr::session
