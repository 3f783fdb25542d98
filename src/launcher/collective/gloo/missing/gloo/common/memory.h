// Declares what gloo's header of this name declares, as far as gloo/transport/tcp/unbound_buffer.h needs it:
// Debian's libgloo-dev has the latter but not this one. It is looked for last, after the system's headers.
#pragma once

#include <memory>

namespace gloo {

/// What an object hands references to itself out from. Only its size matters here: nobody but gloo makes one.
template <class T>
class ShareableNonOwningPtr {
 public:
  explicit ShareableNonOwningPtr(T* object);
  ~ShareableNonOwningPtr();

 private:
  std::shared_ptr<T> object_;
};

template <class T>
class WeakNonOwningPtr {
 public:
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>& object);

 private:
  std::weak_ptr<T> object_;
};

}  // namespace gloo
