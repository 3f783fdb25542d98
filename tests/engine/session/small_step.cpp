#include "small_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "reduction_reference.hpp"

namespace accelmgr::session {
namespace {

constexpr std::uint64_t chunk_elements = chunk_bytes / 4;
constexpr std::uint32_t micro_batches = 2;
constexpr std::size_t partly_absent = 1;  // The last rank has no gradient of this tensor.

// Each slice has 2 or 3 chunks and cuts through tensors. The last chunk is incomplete.
SmallSession session_for(const Death& death) {
  // Three chunks of what is trained from the start, and two of the tensor that is unfrozen.
  if (death.is_mixed) return mixed_session(death.ranks, {1600, 2500, 17, 9, 300, 250, 150, 40, 20, 33});
  const std::uint64_t chunks = death.ranks == 2 ? 5 : 8;
  return small_session(death.ranks, {1500, 17, chunks * chunk_elements - 704 - 1536});
}

// Sums of these values are not exact, so another order of additions would show.
float gradient(int rank, std::uint64_t i) { return 0.1f * float(rank + 1) + 0.37f * float(i % 1009); }
float earlier(std::uint64_t i) { return 0.7f * float(i % 13); }

std::byte pattern(std::size_t i, int salt) {
  return static_cast<std::byte>((i * 31 + static_cast<std::size_t>(salt) * 7) & 255);
}

// Both kinds of divisors come from the ballots: the number of micro-batches, and the sum of weights.
LossWeights weights_of(const Death& death) {
  return death.accumulate ? LossWeights::field : LossWeights::micro_batches;
}

double weight_of(int rank) { return 3 * rank + 1; }

// Of the third update. Group::no_decay is group 1.
constexpr UpdateGroup decays{
    .learning_rate = 0.01, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8};
constexpr UpdateGroup does_not_decay{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8};
constexpr Update update{
    .kind = Update::Kind::adamw, .clip_norm = 2, .divisor = 2, .groups = {decays, does_not_decay}};
constexpr std::uint64_t updates_before = 2;

// What an updated tensor holds before.
double parameter(std::uint64_t i) { return 0.01 * double(i % 101) - 0.5; }
double first_moment(std::uint64_t i) { return 0.002 * double(i % 17) - 0.01; }
double second_moment(std::uint64_t i) { return 1e-4 * double(i % 23 + 1); }

Elements in_parameters(std::byte* parameters, const TensorEntry& tensor) {
  return {parameters + tensor.offset, *element_of(tensor.dtype), tensor.elements()};
}

// Rank 0 computes one micro-batch too few, so that the mean is not just a sum.
std::uint32_t micro_batches_of(int rank) { return rank == 0 ? 1 : micro_batches; }

}  // namespace

SmallStep::SmallStep(const Death& death)
    : death_(death),
      small_(session_for(death)),
      reduction_(small_.session, small_.manifest),
      update_(small_.session, small_.manifest),
      others_view_(Session::attach(descriptors_of(small_.session))),
      others_reduction_(others_view_, read_manifest(others_view_)),
      others_update_(others_view_, read_manifest(others_view_)) {
  fill();
  Image start;
  take(start);
  before_ = start;
  const auto undisturbed = open();
  for (int rank = 0; rank < death.ranks; ++rank) vote(small_.session, reduction_, rank, undisturbed);
  for (int rank = 0; rank < death.ranks; ++rank) reduction_.finish_slice(rank, undisturbed);
  for (int rank = 0; rank < death.ranks && death.updates; ++rank) update_.finish_slice(rank, undisturbed);
  close_if_over(small_.session, undisturbed);
  take(counted_);
  put_back(start);

  attempt_ = open();
  const bool dies_late = death.section == Section::last_slice;
  for (int rank = 0; rank < death.ranks; ++rank)
    if (rank != death.rank || dies_late) vote(others_view_, others_reduction_, rank, attempt_);
  for (int rank = 0; rank < death.ranks; ++rank)
    if (rank != death.rank && dies_late) others_reduction_.finish_slice(rank, attempt_);
}

void SmallStep::fill() {
  auto& session = small_.session;
  if (death_.updates) session.allocate_moments(Moments::both);
  for (std::size_t t = 0; t < small_.manifest.tensors.size(); ++t) {
    if (!has_gradient(session, small_.manifest, t)) continue;
    const auto& tensor = small_.manifest.tensors[t];
    for (std::uint64_t i = 0; i < elements_with_gap(tensor); ++i) {
      in_master(session.gradients(), tensor).set(i, earlier(i));
      for (int rank = 0; rank < death_.ranks; ++rank)
        in_slab(session, rank, tensor).set(i, gradient(rank, i));
    }
    if (!death_.updates || tensor.group == Group::frozen) continue;
    session.updated()[t] = {.group = std::uint64_t(tensor.group), .updates_before = updates_before};
    const auto put = [&](std::byte* memory, auto value) {
      in_parameters(memory, tensor).change([&](double, std::uint64_t i) { return value(i); });
    };
    put(session.parameters(), parameter);
    put(session.moments(), first_moment);
    put(session.moments() + session.header().bytes.trained, second_moment);
  }
  auto* copies = reinterpret_cast<std::byte*>(&session.counters(0));
  for (std::size_t i = 0; i < 2 * session.header().copy_bytes; ++i) copies[i] = pattern(i, 1);
  session.counters(0) = {};
  for (auto& made : session.updates(0)) made = 0;
  session.counters(0).steps = 5;
  session.counters(0).samples = 70;
  state_.resize(generator_bytes + session.header().buffer_bytes);
  for (std::size_t i = 0; i < state_.size(); ++i) state_[i] = pattern(i, 2);
  const float running[2] = {1.25f, -3.5f};
  std::memcpy(state_.data() + generator_bytes + small_.manifest.buffers[0].offset, running, sizeof running);
}

std::uint64_t SmallStep::open() {
  const auto attempt =
      open_attempt(small_.session, {.participants = participants(),
                                    .accumulate = death_.accumulate,
                                    .shares = even_shares(micro_batches),
                                    .batch_size = 4,
                                    .loss_weights = weights_of(death_),
                                    .mean_buffers = 1,
                                    .applies = death_.updates ? Applies::session : Applies::host,
                                    .update = update});
  for (int rank = 0; rank < death_.ranks; ++rank)
    for (std::size_t tensor = 0; tensor < small_.manifest.tensors.size(); ++tensor)
      small_.session.tags(rank)[tensor].store(
          tensor == partly_absent && rank == death_.ranks - 1 ? attempt - 1 : attempt);
  return attempt;
}

// Votes as a runner does.
void SmallStep::vote(Session& session, const Reduction& reduction, int rank, std::uint64_t attempt) {
  reduction.reset_cursor(rank, attempt);
  const auto other = session.word().index ^ 1;
  std::memcpy(session.buffers(other, rank), state_.data() + generator_bytes, session.header().buffer_bytes);
  std::memcpy(session.generator(other, rank), state_.data(), generator_bytes);
  auto& ballot = session.record(rank).ballot;
  ballot.loss = 0.5;
  ballot.weight = weight_of(rank);
  ballot.micro_batches = micro_batches_of(rank);
  ballot.samples = ballot.elements = 4 * ballot.micro_batches;
  cast_vote({session, rank}, attempt);
}

void SmallStep::run_section() {
  auto& session = small_.session;
  if (death_.section == Section::last_vote) vote(session, reduction_, death_.rank, attempt_);
  reduction_.finish_slice(death_.rank, attempt_);
  if (death_.updates && slices_finished(session, attempt_)) update_.finish_slice(death_.rank, attempt_);
  close_if_over(session, attempt_);
}

void SmallStep::finish(std::uint64_t attempt) {
  if (!abort_attempt(others_view_, attempt, author_supervisor) &&
      others_view_.word().committed(participants())) {
    others_reduction_.finish_slice(death_.rank, attempt);
    for (int rank = 0; rank < death_.ranks; ++rank) others_reduction_.finish_slice(rank, attempt);
    for (int rank = 0; rank < death_.ranks && death_.updates; ++rank)
      others_update_.finish_slice(rank, attempt);
  }
  close_if_over(others_view_, attempt);
}

void SmallStep::recover() { finish(attempt_); }

void SmallStep::recover_without_undo() {
  auto& record = others_view_.record(death_.rank);
  for (auto* word : {&record.cursor, &record.update_cursors[0].bits}) {
    auto cursor = decode_cursor(word->load());
    cursor.in_flight = false;
    word->store(encode(cursor));
  }
  finish(attempt_);
}

void SmallStep::take(Image& image) {
  const auto& header = small_.session.header();
  const auto* head = memory_of(small_.session);
  image.head.assign(head, head + header.queues);
  image.gradients.assign(small_.session.gradients(), small_.session.gradients() + header.bytes.gradient_room);
  image.updated = updated_memory();
}

void SmallStep::put_back(const Image& image) {
  std::memcpy(memory_of(small_.session), image.head.data(), image.head.size());
  std::memcpy(small_.session.gradients(), image.gradients.data(), image.gradients.size());
  if (image.updated.empty()) return;
  const auto& bytes = small_.session.header().bytes;
  std::memcpy(small_.session.parameters(), image.updated.data(), bytes.parameters);
  std::memcpy(small_.session.moments(), image.updated.data() + bytes.parameters, 2 * bytes.trained);
}

std::vector<std::byte> SmallStep::updated_memory() {
  std::vector<std::byte> memory;
  if (!death_.updates) return memory;
  const auto& bytes = small_.session.header().bytes;
  memory.assign(small_.session.parameters(), small_.session.parameters() + bytes.parameters);
  memory.insert(memory.end(), small_.session.moments(), small_.session.moments() + 2 * bytes.trained);
  return memory;
}

bool SmallStep::committed() const {
  const auto word = small_.session.word();
  return !word.abort && (word.closed || word.mask == participants());
}

/// Returns the first difference of master gradients.
std::string SmallStep::difference(const Numbers& found, const Numbers& expected) {
  for (std::size_t t = 0; t < found.size(); ++t)
    for (std::size_t i = 0; i < found[t].size(); ++i)
      if (found[t][i] != expected[t][i])
        return fmt::format("master gradient {} of tensor {} is {}, not {}", i, t, found[t][i],
                           expected[t][i]);
  return "master gradients differ where no tensor lies";
}

/// Returns the first difference in the master gradients or in copy `index`.
std::string SmallStep::differs(const Image& expected, std::uint32_t index) {
  auto& session = others_view_;
  if (std::memcmp(session.gradients(), expected.gradients.data(), expected.gradients.size()) != 0) {
    auto other = expected.gradients;
    return difference(numbers_in(session.gradients(), small_.manifest),
                      numbers_in(other.data(), small_.manifest));
  }
  if (updated_memory() != expected.updated) return "parameters or moments are others";
  const auto* copy = reinterpret_cast<const std::byte*>(&session.counters(index));
  const auto at = session.header().copies + index * session.header().copy_bytes;
  if (std::memcmp(copy, expected.head.data() + at, session.header().copy_bytes) != 0)
    return fmt::format("copy {} (counters, generators, buffers, result) is another", index);
  return {};
}

std::string SmallStep::wrong(bool was_committed) {
  const auto word = others_view_.word();
  if (!word.closed || word.attempt != attempt_) return "the attempt is not closed";
  if (word.abort == was_committed || word.index != (was_committed ? 1u : 0u))
    return was_committed ? "a committed attempt does not count" : "an attempt counts that was not committed";
  if (!was_committed) {
    const auto difference = differs(before_, 0);
    return difference.empty() ? wrong_when_made_again() : "not counted, but " + difference;
  }
  for (const std::uint32_t index : {0u, 1u})
    if (const auto difference = differs(counted_, index); !difference.empty())
      return "counted, but " + difference;
  return {};
}

std::string SmallStep::wrong_when_made_again() {
  const auto again = open();
  for (int rank = 0; rank < death_.ranks; ++rank) vote(others_view_, others_reduction_, rank, again);
  finish(again);
  auto difference = differs(counted_, 1);
  if (others_view_.word().index != 1) difference = "the index is the old one";
  for (int rank = 0; rank < death_.ranks; ++rank)
    for (auto& tag : small_.session.tags(rank)) tag.store(tag.load() - 1);
  return difference.empty() ? difference : "made again after an abort: " + difference;
}

// Expects the sum in the order of the ranks, times the scale of the mean, or of the weights.
std::string SmallStep::undisturbed_wrong() {
  const std::uint32_t full = micro_batches * static_cast<std::uint32_t>(death_.ranks);
  double weights = 0;
  for (int rank = 0; rank < death_.ranks; ++rank) weights += weight_of(rank);
  const auto scale = weights_of(death_) == LossWeights::field ? 1 / weights : double(full) / double(full - 1);
  auto gradients = counted_.gradients;
  const auto found = numbers_in(gradients.data(), small_.manifest);
  auto expected = found;
  for (std::size_t t = 0; t < expected.size(); ++t) {
    const auto& types = small_.manifest.tensors[t].types;
    const bool trained = has_gradient(small_.session, small_.manifest, t);
    for (std::size_t i = 0; i < expected[t].size(); ++i) {
      std::vector<double> slabs;
      for (int rank = 0; rank < death_.ranks - (t == partly_absent ? 1 : 0); ++rank)
        slabs.push_back(rounded(types.slab, gradient(rank, i)));
      const auto before = rounded(types.master, earlier(i));
      expected[t][i] = trained ? reduced(types, slabs, scale, death_.accumulate, before) : 0;
    }
  }
  if (found != expected) return difference(found, expected);
  const auto* counters = reinterpret_cast<const Counters*>(
      counted_.head.data() + small_.session.header().copies + small_.session.header().copy_bytes);
  if (counters->steps != 6 || counters->samples != 70 + 4 * (full - 1)) return "the counters are wrong";
  const auto& session = std::as_const(small_.session);
  const auto at = reinterpret_cast<const std::byte*>(session.updates(1).data()) - memory_of(small_.session);
  const auto& updates = *reinterpret_cast<const Count*>(counted_.head.data() + at);
  const bool is_updated = updates == 1 && counters->updated_step == 6;
  const bool is_not = updates == 0 && counters->updated_step == 0;
  if (!(death_.updates ? is_updated : is_not)) return "the number of updates is wrong";
  return death_.updates ? wrong_updates(expected) : "";
}

// AdamW by its definition, in double.
std::string SmallStep::wrong_updates(const Numbers& gradients) {
  const auto& tensors = small_.manifest.tensors;
  double squares = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t)
    if (tensors[t].group != Group::frozen)
      for (const auto g : gradients[t]) squares += g * g;
  const auto norm = std::sqrt(squares) / update.divisor;
  const auto clip = std::min(1.0, update.clip_norm / (norm + 1e-6));
  auto updated = counted_.updated;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].group == Group::frozen) continue;
    const auto found = in_parameters(updated.data(), tensors[t]);
    const auto type = *element_of(tensors[t].dtype);
    const double tolerance = type == Element::f64 ? 1e-12 : type == Element::f32 ? 1e-6 : 1e-2;
    for (std::uint64_t i = 0; i < found.size(); ++i) {
      const double before = rounded(type, parameter(i)), g = gradients[t][i] / update.divisor * clip;
      const auto m = 0.9 * rounded(type, first_moment(i)) + 0.1 * g;
      const auto v = 0.99 * rounded(type, second_moment(i)) + 0.01 * g * g;
      const auto decay = update.groups[std::size_t(tensors[t].group)].weight_decay;
      const auto expected = before * (1 - 0.01 * decay) - 0.01 * m / (1 - std::pow(0.9, 3)) /
                                                              (std::sqrt(v / (1 - std::pow(0.99, 3))) + 1e-8);
      if (std::abs(found[i] - expected) > tolerance * std::max(1.0, std::abs(expected)))
        return fmt::format("parameter {} of tensor {} is {}, not {}", i, t, found[i], expected);
    }
  }
  return {};
}

}  // namespace accelmgr::session
