#include "launcher/agent/line_prefixer.hpp"

#include <algorithm>

namespace accelmgr::agent {

void LinePrefixer::feed(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    if (begun_.size() == longest_line_bytes && bytes.front() != '\n') finish(out);
    const auto room = longest_line_bytes - begun_.size();
    const auto end = bytes.substr(0, room + 1).find('\n');
    if (end != std::string_view::npos) {
      out.append(prefix_).append(begun_).append(bytes.substr(0, end + 1));
      begun_.clear();
      bytes.remove_prefix(end + 1);
    } else {
      begun_.append(bytes.substr(0, room));
      bytes.remove_prefix(std::min(room, bytes.size()));
    }
  }
}

void LinePrefixer::finish(std::string& out) {
  if (begun_.empty()) return;
  out.append(prefix_).append(begun_).push_back('\n');
  begun_.clear();
}

}  // namespace accelmgr::agent
