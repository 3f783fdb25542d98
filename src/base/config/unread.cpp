// Finds keys that nothing reads in a program that makes the steps itself, and says why.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/config/loader.hpp"

namespace accelmgr::config {
namespace {

bool is_in(std::string_view key, std::string_view section) {
  return key.starts_with(section) && (key.size() == section.size() || key[section.size()] == '.');
}

struct OfTheProgram {
  std::string_view section;
  std::string_view why;
};

constexpr std::array of_the_program{
    OfTheProgram{"optimizer", "the program makes its optimizer itself, over the manager's parameters"},
    OfTheProgram{"train", "the program decides how many steps it makes, and what it does between them"},
    OfTheProgram{"launch", "`accelmgr spawn` and MultiprocessConfig read it; a manager does not"},
    OfTheProgram{"parameters.snapshot", "only `accelmgr serve` reads it, whose hosts come and go"},
    OfTheProgram{"checkpoint.every", "the program calls save_checkpoint() when a checkpoint is due"},
};

/// The keys that a built-in kind of model or data reads in its section.
struct Kind {
  std::string_view name;
  std::vector<std::string_view> reads;
};

const std::vector<Kind> models{
    {"mlp", {"model.mlp"}},
    {"convnet", {"model.convnet"}},
    {"gpt", {"model.gpt"}},
    {"torchscript", {"model.file"}},
    {"python", {"model.factory", "model.options"}},
};

const std::vector<Kind> sources{
    {"text",
     {"data.files", "data.sequence_length", "data.held_out", "data.epochs", "data.seed", "data.drop_last",
      "data.keep_last_step"}},
    {"synthetic",
     {"data.sequence_length", "data.elements", "data.epochs", "data.seed", "data.drop_last",
      "data.keep_last_step"}},
    {"python", {"data.factory", "data.options", "data.epochs", "data.drop_last", "data.keep_last_step"}},
};

/// Why `kind` does not read `key`; empty if it reads or may read it. A registered kind may read any key.
std::string unread_by(const std::vector<Kind>& kinds, const std::string& kind, std::string_view section,
                      std::string_view key) {
  if (!is_in(key, section)) return {};
  const auto found = std::ranges::find(kinds, kind, &Kind::name);
  if (found == kinds.end() || std::ranges::any_of(found->reads, [&](auto read) { return is_in(key, read); }))
    return {};
  return fmt::format("{}.kind {} does not read it", section, kind);
}

std::string why_unread(const Config& config, const Own& own, std::string_view key) {
  for (const auto& [section, why] : of_the_program)
    if (is_in(key, section)) return std::string(why);
  if (key == "model.kind" || key == "data.kind") return {};
  if (own.model && is_in(key, "model")) return "the model is the program's own";
  if (own.data && is_in(key, "data"))
    return key == "data.epochs" || key == "data.drop_last" || key == "data.keep_last_step"
               ? ""
               : "the dataset is the program's own, and decides on its elements and their order";
  const auto why = unread_by(models, config.model.kind, "model", key);
  return why.empty() ? unread_by(sources, config.data.kind, "data", key) : why;
}

}  // namespace

std::vector<Unread> unread(const LoadedConfig& loaded, const Own& own) {
  std::vector<Unread> found;
  for (const auto& [key, source] : loaded.sources) {
    if (source == "default") continue;
    if (auto why = why_unread(loaded.config, own, key); !why.empty())
      found.push_back({key, source, std::move(why)});
  }
  return found;
}

}  // namespace accelmgr::config
