#include "engine/runner/rounded_parameters.hpp"

#include "engine/replica/model.hpp"
#include "engine/session/kernels.hpp"

namespace accelmgr::runner {
namespace {

bool is_rounded(const session::TensorEntry& entry) { return entry.runner_dtype != entry.dtype; }

}  // namespace

RoundedParameters::RoundedParameters(const session::RunnerView& runner, const session::Manifest& manifest)
    : runner_(runner), manifest_(manifest) {
  std::uint64_t bytes = 0;
  for (const auto& entry : manifest.tensors) {
    offsets_.push_back(bytes);
    if (is_rounded(entry) && entry.shares < 0)
      bytes += session::align_up(entry.count * size_of(entry.runner_dtype), session::region_alignment);
  }
  if (bytes == 0) return;
  const auto memory = ipc::create_memfd("accelmgr-bf16", bytes);
  memory_ = ipc::Mapping(memory.get(), 0, bytes, ipc::Access::read_write);
  ipc::populate(memory_.data(), bytes, 1);
}

std::vector<replica::Place> RoundedParameters::places() const {
  auto places = replica::places_of(runner_.parameters(), manifest_);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& entry = manifest_.tensors[i];
    if (!is_rounded(entry)) continue;
    const auto owner = entry.shares < 0 ? i : static_cast<std::size_t>(entry.shares);
    places[i].data = memory_.data() + offsets_[owner] + entry.shared_offset * size_of(entry.runner_dtype);
  }
  return places;
}

void RoundedParameters::load(const std::function<bool(std::size_t)>& is_stale) {
  for (std::size_t i = 0; i < offsets_.size(); ++i)
    if (const auto& entry = manifest_.tensors[i]; is_rounded(entry) && entry.shares < 0 && is_stale(i))
      session::best_kernels().round_to_bf16(memory_.data() + offsets_[i], runner_.parameters() + entry.offset,
                                            entry.count);
}

}  // namespace accelmgr::runner
