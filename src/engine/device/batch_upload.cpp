#include "engine/device/batch_upload.hpp"

#include <algorithm>

namespace accelmgr::device {

BatchUpload::BatchUpload(Device& device, base::Waiter& waiter, StreamHandle copies, StreamHandle compute,
                         double timeout_s)
    : device_(device), waiter_(waiter), copies_(copies), compute_(compute), timeout_s_(timeout_s) {
  for (auto& slot : slots_) slot.copied = device.make_event();
}

BatchUpload::~BatchUpload() {
  device_.settle(copies_);
  device_.settle(compute_);
}

std::optional<std::span<std::byte>> BatchUpload::stage(std::size_t bytes) {
  auto& slot = slots_[next_];
  if (slot.used && !device_.wait(slot.copied, waiter_, timeout_s_)) return std::nullopt;
  if (slot.pages.span().size() < bytes) slot.pages.grow(device_, bytes);
  return slot.pages.span();
}

void BatchUpload::load(std::span<const Part> parts) {
  const auto& copied = slots_[next_].copied;
  copy(parts, copies_);
  device_.wait(compute_, copied);
}

void BatchUpload::load_behind(std::span<const Part> parts) { copy(parts, compute_); }

void BatchUpload::copy(std::span<const Part> parts, StreamHandle stream) {
  auto& slot = slots_[next_];
  slot.used = true;
  next_ = (next_ + 1) % slots_.size();
  for (const auto& part : parts)
    device_.copy(part.to, slot.pages.span().data() + part.offset, part.bytes, Direction::to_device, stream);
  device_.record(slot.copied, stream);
}

Results::~Results() { device_.settle(compute_); }

std::span<const std::byte> Results::read(std::span<const Part> parts, std::size_t bytes) {
  const auto room = pages_.empty() ? 0 : pages_.back()->span().size();
  if (room < std::max<std::size_t>(bytes, 1))
    pages_.emplace_back(std::make_unique<PinnedPages>())->grow(device_, std::max(bytes, 2 * room));
  const auto memory = pages_.back()->span();
  for (const auto& part : parts)
    device_.copy(memory.data() + part.offset, part.from, part.bytes, Direction::to_host, compute_);
  return memory;
}

}  // namespace accelmgr::device
