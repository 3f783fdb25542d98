// The input is a message between a launching process and a rank of it. Its first byte says which one.
#include <cmath>
#include <csignal>

#include "accelmgr/errors.hpp"
#include "fuzz_target.hpp"
#include "launcher/launch/run/child_messages.hpp"

using namespace accelmgr;
using fuzz::expect;

namespace {

bool has_nul(const std::string& text) { return text.find('\0') != std::string::npos; }

void check(const launch::Order& order) {
  expect(order.rank >= 0, "a rank");
  for (const int target : order.targets) expect(target >= 0 && target < 1 << 20, "a descriptor");
  for (const auto& [name, value] : order.environment)
    expect(!name.empty() && name.find('=') == std::string::npos && !has_nul(name) && !has_nul(value),
           "a variable", name);
  for (const auto& argument : order.program) expect(!has_nul(argument), "an argument", argument);
}

void check(const launch::Report& report) {
  if (!report.failure) return;
  expect(report.failure->exit_code >= 0 && report.failure->exit_code <= 255, "an exit code");
  expect(report.failure->signal >= 0 && report.failure->signal <= SIGRTMAX, "a signal");
  expect(std::isfinite(report.failure->time_s), "a time");
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string text(fuzz::text_of(data + 1, size - 1));
  try {
    if (data[0] == 'o')
      check(launch::decode_order(text));
    else if (data[0] == 'c')
      (void)launch::decode_call(text);
    else
      check(launch::decode_report(text));
  } catch (const SessionError&) {
    ++fuzz::refused;
  }
  return 0;
}
