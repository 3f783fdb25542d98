// accelmgr._native.StepResult and FailureCause: what a step returns, to be read, pickled and written as JSON.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <type_traits>
#include <utility>

#include "accelmgr/errors.hpp"
#include "accelmgr/step_result.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

// What results consist of: read, pickled and written as a dictionary by one list.

template <class Visit>
void each_field(const FailureCause*, Visit field) {
  field("time_s", &FailureCause::time_s);
  field("rank", &FailureCause::rank);
  field("pid", &FailureCause::pid);
  field("phase", &FailureCause::phase);
  field("step", &FailureCause::step);
  field("attempt", &FailureCause::attempt);
  field("exit", &FailureCause::exit);
  field("what", &FailureCause::what);
  field("log", &FailureCause::log);
}

template <class Visit>
void each_field(const StepResult*, Visit field) {
  field("status", &StepResult::status);
  field("counted", &StepResult::counted);
  field("step", &StepResult::step);
  field("attempt", &StepResult::attempt);
  field("loss", &StepResult::loss);
  field("samples", &StepResult::samples);
  field("scalars", &StepResult::scalars);
  field("parameter_version", &StepResult::parameter_version);
  field("nonfinite", &StepResult::nonfinite);
  field("step_ms", &StepResult::step_ms);
  field("compute_ms", &StepResult::compute_ms);
  field("reduce_ms", &StepResult::reduce_ms);
  field("wait_ms", &StepResult::wait_ms);
  field("error", &StepResult::error);
  field("error_type", &StepResult::error_type);
  field("rank", &StepResult::rank);
  field("participants", &StepResult::participants);
  field("tries", &StepResult::tries);
  field("skipped", &StepResult::skipped);
  field("causes", &StepResult::causes);
}

using Scalars = std::vector<std::pair<std::string, double>>;

nb::dict dict_of(const Scalars& scalars) {
  nb::dict dict;
  for (const auto& [name, value] : scalars) dict[name.c_str()] = value;
  return dict;
}

/// Of numbers, texts, lists and dictionaries alone, as JSON has them.
template <class Record>
nb::dict to_dict(const Record& record);

template <class T>
nb::object plain(const T& value) {
  return nb::cast(value);
}
nb::object plain(StepStatus status) { return nb::cast(to_string(status)); }
nb::object plain(const Scalars& scalars) { return dict_of(scalars); }
nb::object plain(const std::vector<FailureCause>& causes) {
  nb::list list;
  for (const auto& cause : causes) list.append(to_dict(cause));
  return list;
}

template <class Record>
nb::dict to_dict(const Record& record) {
  nb::dict dict;
  each_field(&record, [&](const char* name, auto field) { dict[name] = plain(record.*field); });
  return dict;
}

template <class Record>
Record from_dict(const nb::dict& dict);

template <class T>
void read(const nb::handle& value, T& into) {
  into = nb::cast<T>(value);
}
void read(const nb::handle& value, StepStatus& into) {
  const auto name = nb::cast<std::string>(value);
  for (auto status = StepStatus::ok; status <= StepStatus::manager_lost;
       status = static_cast<StepStatus>(static_cast<int>(status) + 1))
    if (name == to_string(status)) {
      into = status;
      return;
    }
  throw UsageError(fmt::format("a StepResult of status '{}'", name));
}
void read(const nb::handle& value, Scalars& into) {
  for (const auto& [name, number] : nb::cast<nb::dict>(value))
    into.emplace_back(nb::cast<std::string>(name), nb::cast<double>(number));
}
void read(const nb::handle& value, std::vector<FailureCause>& into) {
  for (const auto cause : nb::cast<nb::list>(value))
    into.push_back(from_dict<FailureCause>(nb::cast<nb::dict>(cause)));
}

template <class Record>
Record from_dict(const nb::dict& dict) {
  Record record;
  each_field(&record, [&](const char* name, auto field) { read(nb::object(dict[name]), record.*field); });
  return record;
}

template <class Record>
nb::class_<Record> record(nb::module_& module, const char* name) {
  nb::class_<Record> type(module, name);
  each_field(static_cast<const Record*>(nullptr), [&](const char* field_name, auto field) {
    if constexpr (std::is_same_v<decltype(field), StepStatus StepResult::*>)
      type.def_prop_ro(field_name, [field](const Record& self) { return to_string(self.*field); });
    else if constexpr (std::is_same_v<decltype(field), Scalars StepResult::*>)
      type.def_prop_ro(field_name, [field](const Record& self) { return dict_of(self.*field); });
    else
      type.def_ro(field_name, field);
  });
  return type
      .def("to_dict", &to_dict<Record>,
           "All of it as numbers, texts, lists and dictionaries, for json.dumps().")
      .def("__getstate__", &to_dict<Record>)
      .def("__setstate__",
           [](Record& self, const nb::dict& state) { new (&self) Record(from_dict<Record>(state)); });
}

/// (loss, samples). Raises the typed error of a result that is not ok.
nb::tuple pair_of(const nb::object& self) {
  const auto& result = nb::cast<const StepResult&>(self);
  if (result.status != StepStatus::ok) nb::module_::import_("accelmgr.errors").attr("raise_for")(self);
  return nb::make_tuple(result.loss, result.samples);
}

}  // namespace

void bind_results(nb::module_& module) {
  record<FailureCause>(module, "FailureCause").def("__repr__", [](const FailureCause& self) {
    const auto who = self.rank < 0 ? std::string("manager or launcher") : fmt::format("rank {}", self.rank);
    return fmt::format("FailureCause({}, step {}{}{}: {})", who, self.step,
                       self.phase.empty() ? "" : ", phase ", self.phase, self.exit);
  });
  record<StepResult>(module, "StepResult")
      .def_prop_ro("ok", [](const StepResult& self) { return self.status == StepStatus::ok; })
      .def("__bool__", [](const StepResult& self) { return self.status == StepStatus::ok; })
      .def(
          "raise_for_status",
          [](nb::object self) {
            if (nb::cast<const StepResult&>(self).status != StepStatus::ok)
              nb::module_::import_("accelmgr.errors").attr("raise_for")(self);
          },
          "Raises the typed error of a result that is not ok.")
      .def(
          "__iter__", [](nb::object self) { return nb::iter(pair_of(self)); },
          "loss, samples; raises the typed error of a result that is not ok.")
      .def("__getitem__",
           [](nb::object self, nb::object index) {
             const nb::object pair = pair_of(self);
             return nb::object(pair[index]);
           })
      .def("__len__", [](const StepResult&) { return 2; })
      .def("__repr__", [](const StepResult& self) {
        if (self.status == StepStatus::ok)
          return fmt::format("StepResult(ok, step {}, loss {:.6g}, {} samples)", self.step, self.loss,
                             self.samples);
        return fmt::format("StepResult({}, step {}: {})", to_string(self.status), self.step, self.error);
      });
}

}  // namespace accelmgr::python
