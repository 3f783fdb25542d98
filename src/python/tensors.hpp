// torch.Tensor of Python and at::Tensor of C++: the same object on both sides, so that what autograd hangs on
// a parameter, and what set_data() does to it, is seen by both. (DLPack would make another tensor over the
// same memory.)
#pragma once

#include <ATen/core/Tensor.h>
#include <nanobind/nanobind.h>

namespace accelmgr::python {

/// False when `object` is no torch.Tensor.
bool load_tensor(PyObject* object, at::Tensor& tensor) noexcept;
/// A new reference; null with a Python error set.
PyObject* wrap_tensor(const at::Tensor& tensor) noexcept;

}  // namespace accelmgr::python

namespace nanobind::detail {

template <>
struct type_caster<at::Tensor> {
  NB_TYPE_CASTER(at::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    return accelmgr::python::load_tensor(source.ptr(), value);
  }
  static handle from_cpp(const at::Tensor& tensor, rv_policy, cleanup_list*) noexcept {
    return accelmgr::python::wrap_tensor(tensor);
  }
};

}  // namespace nanobind::detail
