#include "captured_errors.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <regex>

#include "accelmgr/errors.hpp"
#include "engine/system/staged_run.hpp"

namespace accelmgr::test {
namespace {

constexpr int slice_ms = 100;

int times_in(const std::string& text, const std::string& part) {
  int times = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++times;
  return times;
}

}  // namespace

CapturedErrors::CapturedErrors() {
  setenv("ACCELMGR_LOG_LEVEL", "info", 1);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw SystemError("pipe2", errno);
  said_.reset(ends[0]);
  const base::UniqueFd into(ends[1]);
  fcntl(into.get(), F_SETFL, 0);  // Writers block when the pipe is full.
  std::fflush(stderr);
  before_.reset(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  dup2(into.get(), STDERR_FILENO);
}

CapturedErrors::~CapturedErrors() { restore(); }

void CapturedErrors::restore() {
  if (!before_) return;
  std::fflush(stderr);
  dup2(before_.get(), STDERR_FILENO);
  before_.reset();
}

bool CapturedErrors::read_more() {
  pollfd entry{.fd = said_.get(), .events = POLLIN, .revents = 0};
  poll(&entry, 1, slice_ms);
  char bytes[4096];
  const auto count = read(said_.get(), bytes, sizeof bytes);
  if (count == 0) at_end_ = true;
  if (count <= 0) return false;
  text_.append(bytes, static_cast<std::size_t>(count));
  return true;
}

void CapturedErrors::wait_until(const std::function<bool()>& condition, const std::string& what) {
  for (const auto deadline = soon(); !condition(); read_more()) {
    if (!deadline.passed()) continue;
    ADD_FAILURE() << what << "; it says:\n" << text_;
    return;
  }
}

void CapturedErrors::wait_for(const std::string& text, int times) {
  wait_until([&] { return times_in(text_, text) >= times; }, "nobody says '" + text + "'");
}

void CapturedErrors::wait_for_loss() {
  wait_until([&] { return !losses().empty(); }, "no loss is told");
}

void CapturedErrors::finish() {
  restore();
  wait_until([&] { return at_end_; }, "somebody still holds standard error");
}

std::vector<std::string> CapturedErrors::losses() const {
  static const std::regex loss(
      R"((?:info|warning) \[manager step \d+\] (runner \d+|the fork server) \(pid \d+\) )"
      R"((exit code \d+|killed by signal \d+ \(\w+\)))");
  std::vector<std::string> found;
  for (std::sregex_iterator at(text_.begin(), text_.end(), loss), end; at != end; ++at)
    found.push_back((*at)[1].str() + ": " + (*at)[2].str());
  return found;
}

}  // namespace accelmgr::test
