#include "engine/client/single_user.hpp"

#include <fmt/format.h>

#include "accelmgr/errors.hpp"
#include "base/ipc/system_calls.hpp"

namespace accelmgr::client {
namespace {

constexpr std::uint64_t claimed_bit = std::uint64_t{1} << 62, in_call_bit = std::uint64_t{1} << 63;

std::uint64_t own_number() noexcept { return static_cast<std::uint64_t>(ipc::thread_id()); }

[[noreturn]] void refuse(const char* call) {
  throw UsageError(fmt::format(
      "{}() was called while another thread uses this manager; only one thread at a time may use it", call));
}

}  // namespace

SingleUser::Use::Use(SingleUser& user, const char* call) : user_(user) {
  user.check_owner(call);
  const auto claimed = own_number() | claimed_bit;
  if (user.thread_.compare_exchange_strong(before_, own_number())) return;
  if (before_ == claimed && user.thread_.compare_exchange_strong(before_, claimed | in_call_bit)) return;
  refuse(call);
}

void SingleUser::check_owner(const char* call) const {
  if (!is_owner())
    throw UsageError(
        fmt::format("{}() was called in a forked child; the manager belongs to process {}", call, owner_));
}

void SingleUser::claim(const char* call) {
  check_owner(call);
  const auto claimed = own_number() | claimed_bit;
  std::uint64_t thread = 0;
  if (!thread_.compare_exchange_strong(thread, claimed) && (thread & ~in_call_bit) != claimed) refuse(call);
  ++claims_;
}

void SingleUser::release() noexcept {
  if (--claims_ == 0) thread_.store(0);
}

void SingleUser::take_claim() noexcept { thread_.store(own_number() | claimed_bit); }

}  // namespace accelmgr::client
