#include "engine/runner/batches.hpp"

#include "base/clock.hpp"
#include "base/fault_point.hpp"

namespace accelmgr::runner {

using session::Reason;

std::optional<Batches::Filled> Batches::next(std::uint64_t index, const std::function<bool()>& give_up,
                                             std::uint64_t& waited_ns) const {
  base::fault_point(base::FaultPhase::data);
  Filled filled{};
  const auto begin = base::now_ns();
  const auto state = queue_.wait(queue_.first_of_attempt() + index, filled, config_.runners.spin_us, give_up);
  waited_ns += static_cast<std::uint64_t>(base::now_ns() - begin);
  switch (state) {
    case session::BatchQueue::State::filled:
      return filled;
    case session::BatchQueue::State::none:
      return std::nullopt;
    case session::BatchQueue::State::failed:
      throw AttemptRefused{Reason::data_error, queue_.error()};
    case session::BatchQueue::State::empty:
      throw AttemptRefused{Reason::none, {}};
    case session::BatchQueue::State::ended:
      break;
  }
  throw AttemptRefused{Reason::data_end, "the data has ended"};
}

std::vector<replica::Field> Batches::fields_of(Filled filled) const {
  std::vector<replica::Field> fields;
  fields.reserve(manifest_.fields.size());
  for (const auto& field : manifest_.fields) {
    std::vector<std::int64_t> shape{static_cast<std::int64_t>(filled.elements)};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    fields.push_back({field.name, field.dtype, std::move(shape), filled.slot + field.offset});
  }
  return fields;
}

}  // namespace accelmgr::runner
