#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "base/did_you_mean.hpp"
#include "base/errno_text.hpp"
#include "base/exception_text.hpp"
#include "engine/data/element.hpp"
#include "engine/data/synthetic_source.hpp"
#include "engine/data/text_source.hpp"

namespace accelmgr {
namespace {

// Sorted by name.
std::map<std::string, DataFactory>& factories() {
  static std::map<std::string, DataFactory> all = {{"synthetic", data::synthetic_source},
                                                   {"text", data::text_source}};
  return all;
}

// Makes the source. Errors of a foreign factory do not say where they came from, so the name of the kind is
// added.
std::unique_ptr<BatchSource> build(const std::string& kind, const DataFactory& factory,
                                   const Config& config) {
  std::unique_ptr<BatchSource> source;
  try {
    source = factory(config);
    if (source) data::check_fields(source->fields());
  } catch (const ConfigError&) {
    throw;
  } catch (const SystemError& error) {
    if (base::is_shortage(error.code())) throw;  // Not an error of the data.
    throw DataError(fmt::format("data source '{}': {}", kind, error.what()));
  } catch (...) {
    throw DataError(fmt::format("data source '{}': {}", kind, base::current_exception_text()));
  }
  if (!source) throw DataError(fmt::format("data source '{}': its factory returned null", kind));
  return source;
}

}  // namespace

void BatchSource::restore(const std::string&) {
  throw DataError("this data source has no state(), so it cannot restore() one");
}

void register_data(const std::string& name, DataFactory factory) {
  if (name.empty()) throw UsageError("register_data: the name of a data source must not be empty");
  if (!factory) throw UsageError(fmt::format("register_data: the factory of '{}' is empty", name));
  if (!factories().emplace(name, std::move(factory)).second) {
    throw UsageError(fmt::format("register_data: there is already a data source '{}'", name));
  }
}

std::unique_ptr<BatchSource> make_data(const Config& config) {
  const std::string& kind = config.data.kind;
  const auto found = factories().find(kind);
  if (found == factories().end()) {
    const auto known = data_kinds();
    throw ConfigError(fmt::format("data.kind: there is no data source '{}'; known: {}{}", kind,
                                  fmt::join(known, ", "), base::did_you_mean(kind, known)),
                      "data.kind");
  }
  return build(kind, found->second, config);
}

std::vector<std::string> data_kinds() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : factories()) names.push_back(name);
  return names;
}

}  // namespace accelmgr
