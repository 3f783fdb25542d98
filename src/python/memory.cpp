#include "python/memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "engine/session/strided.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto& memory = *nb::inst_ptr<Memory>(self);
  return PyBuffer_FillInfo(view, self, memory.data, static_cast<Py_ssize_t>(memory.bytes), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

template <class Exception>
DType dtype_named(const std::string& name, const std::string& what) {
  for (std::size_t i = 0; i < dtype_count; ++i)
    if (const auto dtype = static_cast<DType>(i); name_of(dtype) == name) return dtype;
  throw Exception(fmt::format("{} is {}, a dtype that accelmgr does not support", what, name));
}

template DType dtype_named<ModelError>(const std::string&, const std::string&);
template DType dtype_named<DataError>(const std::string&, const std::string&);
template DType dtype_named<CheckpointError>(const std::string&, const std::string&);

std::size_t extent_of(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides) {
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  std::int64_t last = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * strides[d];
  return static_cast<std::size_t>(last) + 1;
}

std::size_t dense_bytes(DType dtype, const std::vector<std::int64_t>& shape) {
  return extent_of(shape, session::dense_strides(shape)) * size_of(dtype);
}

NumberTuple tuple_of(const std::vector<std::int64_t>& numbers) {
  nb::list list;
  for (const auto number : numbers) list.append(number);
  return NumberTuple(nb::tuple(list));
}

void bind_memory(nb::module_& module) {
  nb::class_<Memory>(module, "Memory", nb::type_slots(slots),
                     "Bytes for torch.frombuffer(). A view of them keeps their owner alive.")
      .def("__len__", [](const Memory& self) { return self.bytes; });
}

}  // namespace accelmgr::python
