#pragma once

#include <nanobind/nanobind.h>

#include "base/unmovable.hpp"
#include "python/interpreter.hpp"

namespace accelmgr::python {

/// A reference to an object of Python. The destructor takes the interpreter's lock to drop it.
class ObjectReference : base::Unmovable {
 public:
  explicit ObjectReference(nanobind::object object) : object_(std::move(object)) {}
  ~ObjectReference() {
    const Locked lock;
    object_.reset();
  }
  const nanobind::object& operator*() const noexcept { return object_; }

 private:
  nanobind::object object_;
};

/// The module with make_replica() and make_elements().
inline nanobind::object factories() { return nanobind::module_::import_("accelmgr._runner.factories"); }

}  // namespace accelmgr::python
