#include "base/log_tail.hpp"

#include <algorithm>

#include "base/utf8.hpp"

namespace accelmgr::base {

void append_to_tail(std::span<char> text, std::atomic<std::uint64_t>& written,
                    std::string_view line) noexcept {
  if (text.size() < 2) return;
  const auto end = written.load(std::memory_order_relaxed) + line.size();
  const auto kept = line.substr(line.size() - std::min(line.size(), text.size() - 1));
  const auto at = [&](std::uint64_t i) -> char& { return text[i % text.size()]; };
  for (auto i = end - kept.size(); i <= end; ++i) at(i) = '\0';
  // The NULs are stored before the bytes. A killed process has made its stores in order; the fence makes the
  // compiler keep that order.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (std::size_t i = 0; i < kept.size(); ++i) at(end - kept.size() + i) = kept[i] == '\0' ? ' ' : kept[i];
  written.store(end, std::memory_order_release);
}

std::vector<std::string> log_lines(std::span<const char> text, std::uint64_t written, std::size_t most) {
  const auto bytes = std::min<std::uint64_t>(written, text.size());
  std::string held;
  for (auto i = written - bytes; i < written; ++i) held += text[i % text.size()];
  const auto mark = held.rfind('\0');
  const bool begin_is_lost = bytes < written || mark != std::string::npos;
  if (mark != std::string::npos) held.erase(0, mark + 1);
  const auto end = held.rfind('\n');
  if (end == std::string::npos) return {};
  held.erase(end);

  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin <= held.size();) {
    const auto length = std::min(held.find('\n', begin), held.size()) - begin;
    lines.push_back(valid_utf8(std::string_view(held).substr(begin, length)));
    begin += length + 1;
  }
  if (begin_is_lost && lines.size() == 1) lines.front().insert(0, "...");
  if (begin_is_lost && lines.size() > 1) lines.erase(lines.begin());
  lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(std::min(most, lines.size())));
  return lines;
}

}  // namespace accelmgr::base
