#include "base/did_you_mean.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace accelmgr::base {
namespace {

// Levenshtein distance in which an exchange of two neighbours counts once: that is a common typing error.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> above_last, last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], above_last[j - 2] + 1);
    }
    above_last = std::exchange(last, row);
  }
  return last.back();
}

}  // namespace

std::string nearest(std::string_view name, std::span<const std::string> known) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const auto& candidate : known) {
    const auto d = distance(name, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view meant) {
  return meant.empty() ? "" : "; did you mean '" + std::string(meant) + "'?";
}

std::string did_you_mean(std::string_view name, std::span<const std::string> known) {
  return did_you_mean(nearest(name, known));
}

}  // namespace accelmgr::base
