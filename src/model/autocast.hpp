// torch's automatic mixed precision on the CPU: matrix products and convolutions in bfloat16.
#pragma once

namespace accelmgr::model {

/// While one is alive, operators that this thread calls cast their inputs to bfloat16 where torch deems that
/// safe. Put it around forward() and the loss, not around backward(). AutocastScope(false) does nothing.
/// Scopes nest.
class AutocastScope {
 public:
  explicit AutocastScope(bool on);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  bool on_;
  bool was_enabled_ = false;
  int previous_dtype_ = 0;  ///< An at::ScalarType: the header stays free of torch's.
};

/// Whether operators of this thread are cast now.
bool autocast_enabled();

}  // namespace accelmgr::model
