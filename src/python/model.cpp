#include "python/model.hpp"

#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "data/reading.hpp"
#include "python/interpreter.hpp"
#include "python/tensors.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// An object of Python whose last reference goes with the interpreter's lock.
class Kept {
 public:
  explicit Kept(nb::object object) : object_(std::move(object)) {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    const Locked lock;
    object_.reset();
  }
  nb::object& operator*() noexcept { return object_; }

 private:
  nb::object object_;
};

const std::string& payload_of(const std::map<std::string, std::string>& options) {
  const auto found = options.find("payload");
  if (found == options.end())
    throw ConfigError(
        "model.kind and data.kind 'python' are what accelmgr.Manager sets for objects of Python");
  return found->second;
}

nb::object child() { return nb::module_::import_("accelmgr._child"); }

std::vector<NamedTensor> named(const nb::object& pairs) {
  std::vector<NamedTensor> result;
  for (auto& [name, tensor] : nb::cast<std::vector<std::pair<std::string, at::Tensor>>>(pairs))
    result.push_back({std::move(name), std::move(tensor)});
  return result;
}

/// `replica` is a Replica of accelmgr._child.
class PythonModel final : public Model {
 public:
  explicit PythonModel(nb::object replica)
      : parameters_(named(replica.attr("parameters"))),
        buffers_(named(replica.attr("buffers"))),
        replica_(std::move(replica)) {}

  std::vector<NamedTensor> parameters() override {
    in_python<ModelError>([&] { (*replica_).attr("check_parameters")(); });
    return parameters_;
  }
  std::vector<NamedTensor> buffers() override {
    in_python<ModelError>([&] { (*replica_).attr("settle_buffers")(); });
    return buffers_;
  }
  std::vector<std::string> non_persistent_buffers() const override {
    return in_python<ModelError>(
        [&] { return nb::cast<std::vector<std::string>>((*replica_).attr("non_persistent")); });
  }

  Outputs forward(const Batch& batch) override {
    return in_python<ModelError>([&] {
      nb::list fields;
      for (const auto& [name, tensor] : batch.fields()) fields.append(nb::make_tuple(name, tensor));
      auto [loss, scalars] = nb::cast<std::pair<at::Tensor, std::vector<std::pair<std::string, double>>>>(
          (*replica_).attr("forward")(fields));
      return Outputs{std::move(loss), std::move(scalars)};
    });
  }

  /// The modes of its modules are the user's: they come with the model, and follow the host's.
  void train(bool) override {}

 private:
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  mutable Kept replica_;
};

/// `elements` is an Elements of accelmgr._child: fields by an example of each, next() and state().
class PythonSource final : public BatchSource, public data::ReadsAs {
 public:
  explicit PythonSource(nb::object elements) : elements_(std::move(elements)) {
    for (const auto& [name, example] : named((*elements_).attr("examples")))
      fields_.push_back({name, example.scalar_type(), example.sizes().vec()});
    length_ = nb::cast<std::int64_t>((*elements_).attr("length"));
  }

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    return in_python<DataError>([&] {
      const nb::object values = (*elements_).attr("next")();
      if (values.is_none()) return false;
      std::size_t index = 0;
      for (const auto value : values) write(element, index++, value);
      return true;
    });
  }

  std::string reading(std::uint64_t element) const override {
    if (length_ < 0) return "its next()";
    return fmt::format("dataset[{}]", length_ > 0 ? element % static_cast<std::uint64_t>(length_) : element);
  }

  std::optional<std::string> state() const override {
    return in_python<DataError>([&]() -> std::optional<std::string> {
      const nb::object state = (*elements_).attr("state")();
      if (state.is_none()) return std::nullopt;
      return nb::cast<std::string>(state);
    });
  }

  void restore(const std::string& state) override {
    in_python<DataError>([&] { (*elements_).attr("restore")(state); });
  }

 private:
  // Bytes fill their row as far as they go; accelmgr._child writes and reads how far that is.
  static void write(ElementWriter& element, std::size_t index, nb::handle value) {
    if (!nb::isinstance<nb::bytes>(value)) return element.set(index, nb::cast<at::Tensor>(value));
    const auto bytes = nb::borrow<nb::bytes>(value);
    const auto row = element.bytes(index);
    std::memcpy(row.data(), bytes.data(), std::min(row.size(), bytes.size()));
  }

  mutable Kept elements_;
  std::vector<FieldSpec> fields_;
  std::int64_t length_ = -1;  ///< Of an indexed dataset; 0: it has none. -1: it is iterated.
};

}  // namespace

void register_kind() {
  register_model(kind, [](const Config& config) {
    return in_python<ModelError>([&] {
      return std::make_unique<PythonModel>(child().attr("make_replica")(payload_of(config.model.options)));
    });
  });
  register_data(kind, [](const Config& config) {
    return in_python<DataError>([&] {
      return std::make_unique<PythonSource>(child().attr("make_elements")(payload_of(config.data.options)));
    });
  });
}

}  // namespace accelmgr::python
