
#include "launch/failure.hpp"

namespace accelmgr::launch {
namespace {

std::string text_of(const Failure& first, const std::vector<Failure>& later) {
  auto text = describe(first);
  if (!first.trace.empty()) text += "\n" + first.trace;
  if (!later.empty()) {
    text += text.ends_with('\n') ? "" : "\n";
    text += "later failures:";
    for (const auto& failure : later) text += "\n  " + describe(failure);
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace

SpawnError::SpawnError(Failure first, std::vector<Failure> later)
    : Error(text_of(first, later)), first_(std::move(first)), later_(std::move(later)) {}

}  // namespace accelmgr::launch
