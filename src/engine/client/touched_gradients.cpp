#include "engine/client/touched_gradients.hpp"

#include <cstring>

namespace accelmgr::client {
namespace {

bool is_zero(const std::byte* begin, std::size_t bytes) {
  return bytes == 0 || (begin[0] == std::byte{0} && std::memcmp(begin, begin + 1, bytes - 1) == 0);
}

}  // namespace

Touched::Touched(const session::HostView& view, const session::Manifest& manifest)
    : session_(view.session()), parameters_(manifest.tensors.size(), false) {
  if (session_.counters(session_.word().index).steps == 0) return;  // Nobody has written to the gradients.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& entry = manifest.tensors[i];
    parameters_[i] = session::has_gradient(session_, manifest, i) &&
                     !is_zero(view.gradients() + entry.gradient, entry.gradient_bytes());
  }
}

void Touched::committed(std::uint64_t attempt, bool accumulate) {
  if (!accumulate) none();
  const auto participants = session_.control().request.participants;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if ((participants >> rank & 1) == 0) continue;
    const auto tags = session_.tags(rank);
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (tags[i].load() == attempt) parameters_[i] = true;
  }
}

}  // namespace accelmgr::client
