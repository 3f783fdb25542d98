// What objects of Python hold, noted so that a change of one among thousands is found in microseconds.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/unmovable.hpp"
#include "python/content.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// The part of its object that an entry compares.
enum class Kind : std::uint8_t {
  items,      ///< All keys and values of a dict, or the items of a list.
  keys,       ///< The values of some keys of a dict. They may be missing.
  attribute,  ///< An attribute. It may be missing.
  equal,      ///< The object itself, by ==, with a copy that a method has returned.
  result,     ///< What a method returns, by ==.
  content,    ///< What its memory holds, by a hash.
};

/// Whether one value may stand for the other. Numbers and texts are compared, other objects must be the same.
bool is_same(PyObject* before, PyObject* now) noexcept {
  if (before == now) return true;
  if (before == nullptr || now == nullptr || Py_TYPE(before) != Py_TYPE(now)) return false;
  const auto* type = Py_TYPE(now);
  if (type != &PyFloat_Type && type != &PyLong_Type && type != &PyUnicode_Type && type != &PyComplex_Type &&
      type != &PyBytes_Type)
    return false;
  const int same = PyObject_RichCompareBool(before, now, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

/// Requires: the caller of any member holds the interpreter's lock.
class Snapshot : base::Unmovable {
 public:
  ~Snapshot() { clear(); }

  std::size_t add_items(nb::object owner) { return add(Kind::items, std::move(owner), {}); }
  std::size_t add_keys(nb::typed<nb::dict, nb::str, nb::any> dict, const std::vector<std::string>& keys) {
    return add(Kind::keys, std::move(dict), nb::tuple(nb::cast(keys)));
  }
  std::size_t add_attribute(nb::object owner, nb::str name) {
    return add(Kind::attribute, std::move(owner), std::move(name));
  }
  std::size_t add_equal(nb::object owner, nb::str copies) {
    return add(Kind::equal, std::move(owner), std::move(copies));
  }
  std::size_t add_result(nb::object owner, nb::str method) {
    return add(Kind::result, std::move(owner), std::move(method));
  }

  /// Throws python_error if a buffer has gaps.
  std::size_t add_content(nb::object owner, std::size_t pieces) {
    return add(Kind::content, std::move(owner), nb::cast(pieces));
  }

  std::vector<std::size_t> changed() const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (!is_as_before(entries_[i])) found.push_back(i);
    return found;
  }

  void note(std::size_t index) {
    auto& entry = entries_.at(index);
    note_memory(entry);
    for (auto* value : std::exchange(entry.before, read(entry))) Py_XDECREF(value);
  }

  /// The values noted; of items of a dict, keys and values in turn. Missing values are left out.
  nb::typed<nb::list, nb::any> before(std::size_t index) const {
    nb::list values;
    for (auto* value : entries_.at(index).before)
      if (value != nullptr) values.append(nb::borrow(value));
    return values;
  }

  std::size_t size() const noexcept { return entries_.size(); }

  int traverse(visitproc visit, void* arg) {
    for (const auto& entry : entries_) {
      Py_VISIT(entry.owner);
      Py_VISIT(entry.name);
      for (auto* value : entry.before) Py_VISIT(value);
    }
    return 0;
  }
  void clear() noexcept {
    for (auto& entry : std::exchange(entries_, {})) {
      Py_XDECREF(entry.owner);
      Py_XDECREF(entry.name);
      for (auto* value : entry.before) Py_XDECREF(value);
    }
  }

 private:
  struct Entry {
    Kind kind;
    PyObject* owner;
    PyObject* name;  ///< A key, an attribute, a method; of content the number of pieces; null for items.
    std::vector<PyObject*> before{};
    std::span<const std::byte> memory{};  ///< Of a tensor, where it was when it was noted.
  };

  std::size_t add(Kind kind, nb::object owner, nb::object name) {
    Entry entry{kind, owner.ptr(), name.ptr()};
    note_memory(entry);
    entry.before = read(entry);
    owner.release();
    name.release();
    entries_.push_back(std::move(entry));
    return entries_.size() - 1;
  }

  static void note_memory(Entry& entry) {
    const bool is_tensor = entry.kind == Kind::content && PyObject_CheckBuffer(entry.owner) == 0;
    if (is_tensor) entry.memory = memory_of_object(entry.owner);
  }
  static nb::object called(const Entry& entry) {
    return nb::borrow(entry.owner).attr(nb::borrow<nb::str>(entry.name))();
  }
  static nb::object digested(const Entry& entry) {
    const auto memory = entry.memory.empty() ? memory_of_object(entry.owner) : entry.memory;
    return nb::cast(digest(memory, nb::cast<std::size_t>(nb::handle(entry.name))));
  }
  /// Whether it has other memory than when it was noted.
  static bool has_moved(const Entry& entry) {
    return !entry.memory.empty() &&
           address_of_tensor(entry.owner) != reinterpret_cast<std::uintptr_t>(entry.memory.data());
  }
  /// New references; null for what is missing.
  static std::vector<PyObject*> read(const Entry& entry) {
    std::vector<PyObject*> values;
    const auto add = [&](PyObject* value) {
      Py_XINCREF(value);
      values.push_back(value);
    };
    switch (entry.kind) {
      case Kind::items:
        visit_items(entry.owner, [&](PyObject* value) {
          add(value);
          return true;
        });
        break;
      case Kind::keys:
        for (Py_ssize_t i = 0; i < PyTuple_Size(entry.name); ++i)
          add(PyDict_GetItem(entry.owner, PyTuple_GetItem(entry.name, i)));
        break;
      case Kind::attribute:
        values.push_back(attribute_of(entry));
        break;
      case Kind::equal:
      case Kind::result:
        values.push_back(called(entry).release().ptr());
        break;
      case Kind::content:
        values.push_back(digested(entry).release().ptr());
        break;
    }
    return values;
  }

  /// Calls `visit` with keys and values of a dict in turn, or with the items of a list, as long as it returns
  /// true.
  template <class Visit>
  static bool visit_items(PyObject* owner, Visit&& visit) {
    if (PyDict_Check(owner)) {
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(owner, &position, &key, &value))
        if (!visit(key) || !visit(value)) return false;
      return true;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(owner); ++i)
      if (!visit(PyList_GetItem(owner, i))) return false;
    return true;
  }

  static PyObject* attribute_of(const Entry& entry) noexcept {
    auto* value = PyObject_GetAttr(entry.owner, entry.name);
    if (value == nullptr) PyErr_Clear();
    return value;
  }

  static bool is_as_before(const Entry& entry) {
    const auto& before = entry.before;
    switch (entry.kind) {
      case Kind::items: {
        const auto size = PyDict_Check(entry.owner) ? 2 * PyDict_Size(entry.owner) : PyList_Size(entry.owner);
        if (static_cast<std::size_t>(size) != before.size()) return false;
        auto next = before.begin();
        return visit_items(entry.owner, [&](PyObject* value) { return is_same(*next++, value); });
      }
      case Kind::keys:
        for (std::size_t i = 0; i < before.size(); ++i) {
          auto* key = PyTuple_GetItem(entry.name, static_cast<Py_ssize_t>(i));
          if (!is_same(before[i], PyDict_GetItem(entry.owner, key))) return false;
        }
        return true;
      case Kind::attribute: {
        auto* now = attribute_of(entry);
        const bool same = is_same(before[0], now);
        Py_XDECREF(now);
        return same;
      }
      case Kind::equal:
        return is_equal(entry.owner, before[0]);
      case Kind::result:
        return is_equal(called(entry).ptr(), before[0]);
      case Kind::content:
        try {
          return !has_moved(entry) && is_equal(digested(entry).ptr(), before[0]);
        } catch (const nb::python_error&) {  // It is another kind of tensor by now.
          return false;
        }
    }
    return false;
  }

  static bool is_equal(PyObject* now, PyObject* before) noexcept {
    const int same = PyObject_RichCompareBool(now, before, Py_EQ);
    if (same < 0) PyErr_Clear();
    return same == 1;
  }

  std::vector<Entry> entries_;
};

int traverse_snapshot(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  return nb::inst_ready(self) ? nb::inst_ptr<Snapshot>(self)->traverse(visit, arg) : 0;
}

int clear_snapshot(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Snapshot>(self)->clear();
  return 0;
}

PyType_Slot snapshot_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_snapshot)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_snapshot)},
                                {0, nullptr}};

}  // namespace

void bind_snapshot(nb::module_& module) {
  module.def(
      "digest", [](nb::handle owner, std::size_t pieces) { return digest(memory_of_object(owner), pieces); },
      nb::arg("owner"), nb::arg("pieces") = usual_pieces,
      "A hash of what the memory of a tensor of the CPU holds, or of an object with a buffer. If that "
      "is more than so many pieces of 64 bytes, that many at equal distances are hashed.");
  nb::class_<Snapshot>(module, "Snapshot", nb::type_slots(snapshot_slots),
                       "Notes what objects hold, and finds those that hold something else by now. Numbers "
                       "and texts are compared, other objects must be the same ones. Each add_ returns the "
                       "number of an entry.")
      .def(nb::init<>())
      .def("add_items", &Snapshot::add_items, nb::arg("owner"), "Keys and values of a dict; items of a list.")
      .def("add_keys", &Snapshot::add_keys, nb::arg("dict"), nb::arg("keys"), "The values of these keys.")
      .def("add_attribute", &Snapshot::add_attribute, nb::arg("owner"), nb::arg("name"), "An attribute.")
      .def("add_equal", &Snapshot::add_equal, nb::arg("owner"), nb::arg("copies"),
           "The object, by ==, with the copy that this method of it returns.")
      .def("add_result", &Snapshot::add_result, nb::arg("owner"), nb::arg("method"),
           "What this method returns, by ==.")
      .def("add_content", &Snapshot::add_content, nb::arg("owner"), nb::arg("pieces"),
           "What the memory of a tensor of the CPU holds, or of an object with a buffer; see digest().")
      .def("changed", &Snapshot::changed, "The numbers of entries that have changed.")
      .def("note", &Snapshot::note, nb::arg("entry"), "Notes anew what this entry holds.")
      .def("before", &Snapshot::before, nb::arg("entry"),
           "What it held: of a dict's items keys and values in turn.")
      .def("__len__", &Snapshot::size);
}

}  // namespace accelmgr::python
