#include "launcher/agent/terminal.hpp"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string_view>

#include "base/ipc/wait_ready.hpp"

namespace accelmgr::agent {
namespace {

/// How many bytes a descriptor that polls writable takes without blocking. O_NONBLOCK is not used, because it
/// would change the descriptor for all processes that share it, such as the user's shell.
std::size_t taken_at_once(int stream) noexcept {
  constexpr std::size_t of_a_terminal = 256;
  struct stat status {};
  if (fstat(stream, &status) != 0) return of_a_terminal;
  if (S_ISREG(status.st_mode)) return 1 << 20;
  return S_ISFIFO(status.st_mode) ? PIPE_BUF : of_a_terminal;
}

}  // namespace

void Terminal::write(int stream, std::string text) {
  if (text.empty()) return;
  pending_ += text.size();
  // Few large writes instead of many small ones.
  if (!queue_.empty() && queue_.back().stream == stream && queue_.back().bytes.size() < (64 << 10))
    queue_.back().bytes += text;
  else
    queue_.push_back({stream, std::move(text)});
  pump();
}

void Terminal::pump() {
  while (!queue_.empty()) {
    const auto& text = queue_.front();
    if (ipc::wait_ready(text.stream, POLLOUT, base::Deadline::at_ns(0)) == 0) return;
    const auto rest = std::string_view(text.bytes).substr(written_);
    const auto piece = rest.substr(0, taken_at_once(text.stream));
    const auto count = ::write(text.stream, piece.data(), piece.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count < 0 && errno != EPIPE && text.stream == STDOUT_FILENO && error_ == 0) error_ = errno;
    const auto done = count < 0 ? rest.size() : static_cast<std::size_t>(count);  // An error drops the text.
    written_ += done;
    pending_ -= done;
    if (written_ < text.bytes.size()) continue;
    queue_.pop_front();
    written_ = 0;
  }
}

void Terminal::flush(base::Deadline deadline) {
  for (pump(); !queue_.empty() && !deadline.passed(); pump())
    ipc::wait_ready(queue_.front().stream, POLLOUT, deadline);
}

}  // namespace accelmgr::agent
