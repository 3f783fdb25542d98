// accelmgr._native.StepResult and FailureCause (accelmgr::Failure): the result of a step, which can be
// pickled or become JSON.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "accelmgr/errors.hpp"
#include "accelmgr/step_result.hpp"
#include "engine/session/step_fields.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

// The fields of the records. Properties, pickling and dictionaries all use these lists.

template <class Visit>
void each_field(const Failure*, Visit field) {
  field("time_s", &Failure::time_s, "Seconds since 1970, UTC.");
  field("rank", &Failure::rank, "-1: the fork server or the manager was lost, not a runner.");
  field("pid", &Failure::pid, "The process.");
  field("phase", &Failure::phase, "What the process was doing.");
  field("step", &Failure::step, "The step that was under way, counted from 1.");
  field("attempt", &Failure::attempt, "The last attempt that it took part in.");
  field("exit_code", &Failure::exit_code, "0 if a signal ended it, or if it is not known.");
  field("signal", &Failure::signal, "The number of the signal that ended it; 0 if none did.");
  field("exit", &Failure::exit, "For example \"killed by signal 9 (KILL)\" or \"exit code 17\".");
  field("what", &Failure::what, "Its exception, or why it was killed; may be empty.");
  field("log", &Failure::log, "Its last log lines.");
}

template <class Visit>
void each_field(const StepResult*, Visit field) {
  session::each_step_field<session::StepFields::all>(field);
}

using Scalars = std::vector<std::pair<std::string, double>>;

using ScalarDict = nb::typed<nb::dict, nb::str, nb::float_>;

ScalarDict dict_of(const Scalars& scalars) {
  nb::dict dict;
  for (const auto& [name, value] : scalars) dict[name.c_str()] = value;
  return dict;
}

using Dict = nb::typed<nb::dict, nb::str, nb::object>;

/// A record as numbers, texts, lists and dictionaries, the types of JSON.
template <class Record>
Dict to_dict(const Record& record);

template <class T>
nb::object plain(const T& value) {
  return nb::cast(value);
}
nb::object plain(StepStatus status) { return nb::cast(to_string(status)); }
nb::object plain(const Scalars& scalars) { return dict_of(scalars); }
nb::object plain(const std::vector<Failure>& causes) {
  nb::list list;
  for (const auto& cause : causes) list.append(to_dict(cause));
  return list;
}

template <class Record>
Dict to_dict(const Record& record) {
  nb::dict dict;
  each_field(&record, [&](const char* name, auto field, const char*) { dict[name] = plain(record.*field); });
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
  throw UsageError(fmt::format("'{}' is not the status of a StepResult", name));
}
void read(const nb::handle& value, Scalars& into) {
  for (const auto& [name, number] : nb::cast<nb::dict>(value))
    into.emplace_back(nb::cast<std::string>(name), nb::cast<double>(number));
}
void read(const nb::handle& value, std::vector<Failure>& into) {
  for (const auto cause : nb::cast<nb::list>(value))
    into.push_back(from_dict<Failure>(nb::cast<nb::dict>(cause)));
}

template <class Record>
Record from_dict(const nb::dict& dict) {
  Record record;
  each_field(&record,
             [&](const char* name, auto field, const char*) { read(nb::object(dict[name]), record.*field); });
  return record;
}

/// A script that does not look at the status must not see a loss that looks right.
double number_of(const StepResult& result, double StepResult::*field) {
  const bool has_none = &(result.*field) == &result.loss && !result.counted;
  return has_none ? std::numeric_limits<double>::quiet_NaN() : result.*field;
}

template <class Record>
nb::class_<Record> record(nb::module_& module, const char* name, const char* text) {
  nb::class_<Record> type(module, name, text);
  each_field(
      static_cast<const Record*>(nullptr), [&](const char* field_name, auto field, const char* field_text) {
        if constexpr (std::is_same_v<decltype(field), StepStatus StepResult::*>)
          type.def_prop_ro(
              field_name, [field](const Record& self) { return to_string(self.*field); },
              nb::for_getter(nb::sig("def status(self) -> typing.Literal[\"ok\", \"data_end\", "
                                     "\"runner_lost\", \"nonfinite\", \"timeout\", \"manager_lost\"]")),
              field_text);
        else if constexpr (std::is_same_v<decltype(field), Scalars StepResult::*>)
          type.def_prop_ro(
              field_name, [field](const Record& self) { return dict_of(self.*field); }, field_text);
        else if constexpr (std::is_same_v<decltype(field), double StepResult::*>)
          type.def_prop_ro(
              field_name, [field](const Record& self) { return number_of(self, field); }, field_text);
        else
          type.def_ro(field_name, field, field_text);
      });
  return type
      .def("to_dict", &to_dict<Record>,
           "All of it as numbers, texts, lists and dictionaries, for json.dumps().")
      .def("__getstate__", &to_dict<Record>)
      .def("__setstate__",
           [](Record& self, const Dict& state) { new (&self) Record(from_dict<Record>(state)); });
}

/// (loss, samples). Raises the typed error of a result that is not ok.
nb::tuple pair_of(const nb::object& self) {
  const auto& result = nb::cast<const StepResult&>(self);
  if (result.status != StepStatus::ok) nb::module_::import_("accelmgr.errors").attr("raise_for")(self);
  return nb::make_tuple(result.loss, result.samples);
}

}  // namespace

void bind_results(nb::module_& module) {
  record<Failure>(module, "FailureCause", "How a process was lost, as the supervisor found it.")
      .def("__repr__", [](const Failure& self) {
        const auto who =
            self.rank < 0 ? std::string("manager or fork server") : fmt::format("rank {}", self.rank);
        return fmt::format("FailureCause({}, step {}{}{}: {})", who, self.step,
                           self.phase.empty() ? "" : ", phase ", self.phase, self.exit);
      });
  record<StepResult>(module, "StepResult",
                     "The result of one step. bool(result) is `ok`. `loss, samples = result` raises the "
                     "typed error if it is not ok.")
      .def_prop_ro(
          "ok", [](const StepResult& self) { return self.status == StepStatus::ok; },
          "True if the status is `ok`.")
      .def("__bool__", [](const StepResult& self) { return self.status == StepStatus::ok; })
      .def(
          "raise_for_status",
          [](nb::object self) {
            if (nb::cast<const StepResult&>(self).status != StepStatus::ok)
              nb::module_::import_("accelmgr.errors").attr("raise_for")(self);
          },
          "Raises the StepError of a result that is not `ok`.")
      .def(
          "__iter__",
          [](const nb::object& self) { return nb::typed<nb::iterator, nb::float_>(nb::iter(pair_of(self))); },
          "loss, samples (an int); raises the StepError of a result that is not `ok`.")
      .def(
          "__getitem__",
          [](const nb::object& self, const nb::object& index) {
            const nb::object pair = pair_of(self);
            return nb::object(pair[index]);
          },
          nb::sig("def __getitem__(self, index: int, /) -> float"))
      .def("__len__", [](const StepResult&) { return 2; })
      .def("__repr__", [](const StepResult& self) {
        if (self.status == StepStatus::ok)
          return fmt::format("StepResult(ok, step {}, loss {:.6g}, {} samples)", self.step, self.loss,
                             self.samples);
        return fmt::format("StepResult({}, step {}: {})", to_string(self.status), self.step, self.error);
      });
}

}  // namespace accelmgr::python
