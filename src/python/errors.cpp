// Raises the exceptions of C++ as the classes of accelmgr.errors.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/launch.hpp"
#include "base/cuda/error.hpp"
#include "engine/client/opening.hpp"
#include "launcher/launch/run/failure.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

template <class... Arguments>
void raise(const char* name, const Arguments&... arguments) {
  const auto type = nb::module_::import_("accelmgr.errors").attr(name);
  const auto error = type(arguments...);
  PyErr_SetObject(type.ptr(), error.ptr());
}

/// Names of CollectiveError::Cause, in the order of the enumerators.
constexpr std::array<const char*, 4> causes = {"mismatch", "timeout", "lost", "broken"};

void raise(const launch::SpawnError& error) {
  std::vector<std::string> later;
  for (const auto& failure : error.later()) later.push_back(launch::describe(failure));
  const auto& first = error.first();
  raise("SpawnError", error.what(), first.rank, first.exit_code, first.signal, first.trace, first.type,
        first.phase, later);
}

// The most derived classes come first.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const ConfigError& error) {
    raise("ConfigError", error.what(), error.key());
  } catch (const launch::SpawnError& error) {
    raise(error);
  } catch (const RunnerError& error) {
    raise("RunnerError", error.what(), error.rank(), error.phase());
  } catch (const CollectiveError& error) {
    raise("CollectiveError", error.what(), causes.at(static_cast<std::size_t>(error.cause())), error.ranks());
  } catch (const SystemError& error) {
    raise("SystemError", error.what(), error.code());
  } catch (const UsageError& error) {
    raise("UsageError", error.what());
  } catch (const ModelError& error) {
    raise("ModelError", error.what());
  } catch (const DataError& error) {
    raise("DataError", error.what());
  } catch (const client::ForkHangs& error) {
    raise("ForkHangs", error.what());
  } catch (const SessionError& error) {
    raise("SessionError", error.what());
  } catch (const CheckpointError& error) {
    raise("CheckpointError", error.what());
  } catch (const device::DeviceError& error) {
    raise("DeviceError", error.what());
  } catch (const Error& error) {
    raise("Error", error.what());
  }
}

}  // namespace

std::string describe(const nb::python_error& error) {
  try {
    return nb::cast<std::string>(
        nb::module_::import_("accelmgr._serialization.describe").attr("describe")(error.value()));
  } catch (const std::exception&) {
    return nb::cast<std::string>(error.type().attr("__name__")) + ", whose message cannot be read";
  }
}

void rethrow_typed(const nb::python_error& error) {
  const auto errors = nb::module_::import_("accelmgr.errors");
  if (error.matches(errors.attr("ConfigError")))
    throw ConfigError(describe(error), nb::cast<std::string>(nb::str(error.value().attr("key"))));
  if (error.matches(errors.attr("DeviceError"))) throw device::DeviceError(describe(error), {}, 0);
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace accelmgr::python
