#include "tensor/slab_allocator.hpp"

#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "accelmgr/errors.hpp"

namespace accelmgr::tensor {
namespace {

// Never freed: memory that it handed out may be released while the process ends.
SlabAllocator* installed = nullptr;
thread_local SlabAllocator* active = nullptr;

}  // namespace

SlabAllocator& SlabAllocator::install(const std::vector<Place>& places) {
  if (installed != nullptr)
    throw UsageError("the slab allocator is installed already; a process has one rank");
  installed = new SlabAllocator(places);
  c10::SetCPUAllocator(installed, /*priority=*/100);
  return *installed;
}

SlabAllocator::SlabAllocator(const std::vector<Place>& places)
    : usual_(c10::GetCPUAllocator()), slots_(std::make_unique<Slot[]>(places.size())), count_(places.size()) {
  for (std::size_t i = places.size(); i-- > 0;) {
    slots_[i].begin = places[i].begin;
    by_address_.emplace_back(places[i].begin, i);
    if (places[i].bytes >= min_bytes) by_size_[places[i].bytes].push_back(i);
  }
  std::sort(by_address_.begin(), by_address_.end());
}

void SlabAllocator::offer_all() noexcept {
  for (std::size_t i = 0; i < count_; ++i) slots_[i].offered = true;
}

SlabAllocator::Scope::Scope(SlabAllocator* allocator) noexcept { active = allocator; }
SlabAllocator::Scope::~Scope() { active = nullptr; }

c10::DataPtr SlabAllocator::allocate(std::size_t bytes) {
  if (active == this && bytes >= min_bytes) {
    if (const auto found = by_size_.find(bytes); found != by_size_.end()) {
      for (const auto place : found->second) {
        auto& slot = slots_[place];
        if (slot.offered && !slot.in_use.exchange(true))
          return {slot.begin, slot.begin, &release, c10::Device(c10::DeviceType::CPU)};
      }
    }
  }
  return usual_->allocate(bytes);
}

// Whoever takes raw memory (oneDNN's convolutions do) gives it back here, wherever it came from.
c10::DeleterFnPtr SlabAllocator::raw_deleter() const { return &release; }

void SlabAllocator::release(void* memory) {
  const auto& places = installed->by_address_;
  const auto place =
      std::lower_bound(places.begin(), places.end(), std::pair<const void*, std::size_t>{memory, 0});
  if (place != places.end() && place->first == memory) {
    installed->slots_[place->second].in_use.store(false);
  } else {
    installed->usual_->raw_deleter()(memory);
  }
}

}  // namespace accelmgr::tensor
