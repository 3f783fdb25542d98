#include "python/tensors.hpp"

#include <torch/csrc/autograd/python_variable.h>

namespace accelmgr::python {

bool load_tensor(PyObject* object, at::Tensor& tensor) noexcept {
  if (!THPVariable_Check(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

PyObject* wrap_tensor(const at::Tensor& tensor) noexcept {
  try {
    return THPVariable_Wrap(tensor);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace accelmgr::python
