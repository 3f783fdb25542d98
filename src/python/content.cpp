#include "python/content.hpp"

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

constexpr std::size_t piece_bytes = 64;

/// Calls `visit` with offset and size of each piece, or with those of all bytes, as long as it returns true.
template <class Visit>
bool visit_pieces(std::size_t bytes, std::size_t pieces, Visit&& visit) noexcept {
  if (bytes <= pieces * piece_bytes) return visit(std::size_t{0}, bytes);
  const auto last = bytes - piece_bytes;
  const auto distance = last / (pieces - 1);
  for (std::size_t i = 0; i + 1 < pieces; ++i)
    if (!visit(i * distance, piece_bytes)) return false;
  return visit(last, piece_bytes);
}

/// Empty if its storage does not have these bytes, as after storage.resize_(0).
std::span<const std::byte> content_of(nb::handle tensor) {
  const nb::object storage = tensor.attr("untyped_storage")();
  const auto first = nb::cast<std::uintptr_t>(storage.attr("data_ptr")()), begin = address_of_tensor(tensor);
  const auto has = nb::cast<std::size_t>(storage.attr("nbytes")()),
             wanted = nb::cast<std::size_t>(tensor.attr("nbytes"));
  if (first == 0 || begin < first || begin - first > has) return {};
  return {reinterpret_cast<const std::byte*>(begin), std::min(wanted, has - (begin - first))};
}

}  // namespace

bool is_alike(std::span<const std::byte> one, std::span<const std::byte> other, std::size_t pieces) noexcept {
  return visit_pieces(one.size(), pieces, [&](std::size_t offset, std::size_t bytes) {
    return std::memcmp(one.data() + offset, other.data() + offset, bytes) == 0;
  });
}

std::uint64_t digest(std::span<const std::byte> memory, std::size_t pieces) noexcept {
  auto hash = std::uint64_t{memory.size()};
  visit_pieces(memory.size(), pieces, [&](std::size_t offset, std::size_t bytes) {
    hash = XXH3_64bits_withSeed(memory.data() + offset, bytes, hash);
    return true;
  });
  return hash;
}

std::span<const std::byte> memory_of_object(nb::handle owner) {
  if (PyObject_CheckBuffer(owner.ptr()) == 0) return content_of(owner);
  Py_buffer buffer;
  if (PyObject_GetBuffer(owner.ptr(), &buffer, PyBUF_ANY_CONTIGUOUS) != 0) throw nb::python_error();
  const std::span memory(static_cast<const std::byte*>(buffer.buf), static_cast<std::size_t>(buffer.len));
  PyBuffer_Release(&buffer);
  return memory;
}

std::uintptr_t address_of_tensor(nb::handle tensor) {
  static PyObject* const method =
      nb::object(nb::module_::import_("torch").attr("Tensor").attr("data_ptr")).release().ptr();
  return nb::cast<std::uintptr_t>(nb::handle(method)(tensor));
}

}  // namespace accelmgr::python
