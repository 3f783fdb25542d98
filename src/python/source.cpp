// A dataset of Python as a data source of the loader. accelmgr._data.elements reads it; this file copies
// bytes.
#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "engine/data/reading.hpp"
#include "python/memory.hpp"
#include "python/object_reference.hpp"
#include "python/replica.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// `elements` is an Elements of accelmgr._data.elements.
class PythonSource final : public BatchSource {
 public:
  explicit PythonSource(nb::object elements) : elements_(std::move(elements)) {
    using Described = std::tuple<std::string, std::string, std::vector<std::int64_t>>;
    for (auto& [name, dtype, shape] : nb::cast<std::vector<Described>>((*elements_).attr("fields"))) {
      const auto type = dtype_named<DataError>(dtype, fmt::format("field '{}' of the dataset", name));
      fields_.push_back({std::move(name), type, std::move(shape)});
    }
    length_ = nb::cast<std::int64_t>((*elements_).attr("length"));
  }

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    return in_python<DataError>([&] {
      const nb::object values = (*elements_).attr("next")(consumed_);
      if (values.is_none()) return false;
      std::size_t index = 0;
      for (const auto value : values) write(element, index++, value);
      return true;
    });
  }

  bool more_epochs() const override {
    return in_python<DataError>([&] { return nb::cast<bool>((*elements_).attr("more_epochs")); });
  }

  std::string reading(std::uint64_t element) const override {
    if (length_ < 0) return "its next()";
    return fmt::format("dataset[{}]", length_ > 0 ? element % static_cast<std::uint64_t>(length_) : element);
  }

  void consumed(std::uint64_t elements) override { consumed_ = elements; }

  std::optional<std::string> state() const override {
    return in_python<DataError>([&] { return nb::cast<std::string>((*elements_).attr("state")()); });
  }

  void restore(const std::string& state) override {
    in_python<DataError>([&] { (*elements_).attr("restore")(state); });
  }

 private:
  /// Copies `value` into its row: a dense tensor of the field's dtype and shape, or bytes, which may be
  /// shorter than the row. accelmgr._data.elements puts their length in front.
  static void write(ElementWriter& element, std::size_t index, nb::handle value) {
    const auto row = element.bytes(index);
    if (nb::isinstance<nb::bytes>(value)) {
      const auto bytes = nb::borrow<nb::bytes>(value);
      std::memcpy(row.data(), bytes.data(), std::min(row.size(), bytes.size()));
    } else if (!row.empty()) {
      const auto address = nb::cast<std::uintptr_t>(value.attr("data_ptr")());
      std::memcpy(row.data(), reinterpret_cast<const void*>(address), row.size());
    }
  }

  mutable ObjectReference elements_;
  std::vector<FieldSpec> fields_;
  std::uint64_t consumed_ = 0;
  std::int64_t length_ = -1;  ///< Length of an indexed dataset, 0 if it has none; -1: it is iterated.
};

}  // namespace

void register_sources() {
  register_data(kind, [](const Config& config) {
    return in_python<DataError>([&] {
      return std::make_unique<PythonSource>(factories().attr("make_elements")(
          config.data.factory, config.data.options, config.data.epochs, config.seed_base));
    });
  });
}

}  // namespace accelmgr::python
