#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/did_you_mean.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/cores.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::replica {
namespace {

struct Maker {
  Factory make;
  Opener open;
};

std::map<std::string, Maker>& factories() {
  static std::map<std::string, Maker> all;
  return all;
}

const Maker& factory_of(const std::string& kind) {
  for (const auto& name : {kind, std::string()})
    if (const auto found = factories().find(name); found != factories().end()) return found->second;
  std::vector<std::string> kinds;
  for (const auto& [name, factory] : factories()) kinds.push_back(name);
  throw ConfigError(
      fmt::format("model.kind: this program has no model '{}'{}", kind, base::did_you_mean(kind, kinds)),
      "model.kind");
}

}  // namespace

void register_factory(const std::string& kind, Factory factory, Opener opener) {
  factories()[kind] = {std::move(factory), std::move(opener)};
}

void open_device(const Config& config, Role role) {
  const auto& kind = config.model.kind;
  base::in_user_code<ModelError>(fmt::format("model '{}'", kind), [&] {
    if (const auto& open = factory_of(kind).open) open(config, role);
  });
}

std::unique_ptr<Replica> make_replica(const Config& config, Role role) {
  const auto& kind = config.model.kind;
  auto made = base::in_user_code<ModelError>(fmt::format("model '{}'", kind),
                                             [&] { return factory_of(kind).make(config, role); });
  if (!made) throw ModelError(fmt::format("model '{}': its factory returned null", kind));
  return made;
}

}  // namespace accelmgr::replica
