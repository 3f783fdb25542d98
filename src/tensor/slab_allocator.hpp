// Gradients that are born in the slab: a CPU allocator for torch that, during backward, answers a request of
// exactly a parameter's size with that parameter's place in the slab. If the tensor turns out to be the
// parameter's gradient, nothing is left to copy; if it was something else of the same size, it was memory
// like any other.
//
// A place is handed out while its parameter has no gradient in this attempt and no tensor lives in it, the
// last parameters first: that is the order in which backward needs them.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace accelmgr::tensor {

/// One per process, for good: tensors may outlive anything. Only the thread inside a Scope is given places;
/// any thread may free.
class SlabAllocator final : public c10::Allocator {
 public:
  struct Place {
    std::byte* begin;
    std::size_t bytes;  ///< Of the gradient. Places below min_bytes are never handed out.
  };
  static constexpr std::size_t min_bytes = 64 * 1024;

  /// Makes it torch's CPU allocator. Once per process; throws UsageError the second time.
  static SlabAllocator& install(const std::vector<Place>& places);

  /// All places may be handed out again, but those in which a tensor still lives.
  void offer_all() noexcept;
  /// The parameter has its gradient.
  void withdraw(std::size_t place) noexcept { slots_[place].offered = false; }
  /// Whether a tensor lives in the place.
  bool in_use(std::size_t place) const noexcept { return slots_[place].in_use.load(); }

  /// While it lives, this thread's allocations may be answered with places.
  class Scope {
   public:
    explicit Scope(SlabAllocator* allocator) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Slot {
    std::byte* begin = nullptr;
    bool offered = false;
    std::atomic<bool> in_use{false};
  };
  explicit SlabAllocator(const std::vector<Place>& places);
  static void release(void* memory);

  c10::Allocator* usual_;
  std::unique_ptr<Slot[]> slots_;
  std::size_t count_;
  std::map<std::size_t, std::vector<std::size_t>> by_size_;      ///< Places of a size, the last first.
  std::vector<std::pair<const void*, std::size_t>> by_address_;  ///< All places, ascending.
};

}  // namespace accelmgr::tensor
