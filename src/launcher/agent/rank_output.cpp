#include "launcher/agent/rank_output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/log.hpp"
#include "base/log_tail.hpp"

namespace accelmgr::agent {
namespace {

constexpr std::size_t buffer_bytes = 64 * 1024;
constexpr int most_buffers_at_the_end = 32;  // 2 MiB, more than a pipe holds.

bool write_all(int fd, std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const auto count = write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

}  // namespace

RankOutput::RankOutput(int stream, std::string prefix, const std::filesystem::path& log)
    : stream_(stream), log_name_(log), lines_(std::move(prefix)) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe for the output of a process", errno);
  read_end_.reset(ends[0]);
  write_end_.reset(ends[1]);
  fcntl(read_end_.get(), F_SETFL, O_NONBLOCK);
  if (log.empty()) return;
  log_.reset(open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
  if (!log_) throw SystemError(fmt::format("opening {}", log.string()), errno);
}

std::optional<std::size_t> RankOutput::read_some(Terminal& terminal) {
  static char buffer[buffer_bytes];
  const auto count = read(read_end_.get(), buffer, sizeof buffer);
  if (count < 0) return errno == EINTR || errno == EAGAIN ? std::nullopt : std::optional<std::size_t>(0);
  const std::string_view bytes(buffer, static_cast<std::size_t>(count));
  log(bytes);
  base::append_to_tail(tail_, tail_written_, bytes);
  std::string lines;
  lines_.feed(bytes, lines);
  terminal.write(stream_, std::move(lines));
  return bytes.size();
}

bool RankOutput::take(Terminal& terminal) { return read_some(terminal) != 0U; }

void RankOutput::finish(Terminal& terminal) {
  close_write_end();
  for (int i = 0; i < most_buffers_at_the_end && read_some(terminal).value_or(0) > 0; ++i) {
  }
  read_end_.reset();
  std::string last;
  lines_.finish(last);
  terminal.write(stream_, std::move(last));
  log_.reset();
}

std::vector<std::string> RankOutput::last_lines(std::size_t most) const {
  return base::log_lines(tail_, tail_written_.load(), most);
}

void RankOutput::log(std::string_view bytes) {
  if (!log_ || write_all(log_.get(), bytes)) return;
  base::log().warn("{} does not get the rest of the output: {}", log_name_.string(), base::errno_text(errno));
  log_.reset();  // A full disk must not make the program fail.
}

}  // namespace accelmgr::agent
