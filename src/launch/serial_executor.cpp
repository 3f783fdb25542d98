#include <fmt/format.h>

#include "accelmgr/launch.hpp"
#include "ipc/proc_file.hpp"
#include "launch/serial_memory.hpp"

namespace accelmgr::launch {

struct SerialExecutor::Place {
  std::string name;
  double timeout_s;
  SerialPlace* inside = nullptr;  ///< Written and read by whoever is inside.
};

SerialExecutor::SerialExecutor(std::string name, double timeout_s)
    : place_(std::make_unique<Place>(Place{std::move(name), timeout_s})) {
  if (place_->name.empty() || place_->name.size() > max_serial_name_bytes)
    throw UsageError(fmt::format("the name of a serial executor has 1 to {} bytes; '{}' has {}",
                                 max_serial_name_bytes, place_->name, place_->name.size()));
  // Now, so that what is forked from here has it too. Later, another memory may be the one that counts: this
  // process may be executed, or forked by a forkserver, into a launch.
  serial_place(place_->name);
}

SerialExecutor::~SerialExecutor() = default;

void SerialExecutor::enter() {
  auto& place = serial_place(place_->name);
  if (launch::enter(place, place_->timeout_s)) {
    place_->inside = &place;
    return;
  }
  const auto pid = holder(place);
  auto comm = ipc::read_proc(fmt::format("/proc/{}/comm", pid)).value_or("");
  comm.erase(comm.find_last_not_of('\n') + 1);
  throw SessionError(
      fmt::format("the serial executor '{}' was not free within {} s: process {} ({}) is inside",
                  place_->name, place_->timeout_s, pid, comm.empty() ? "ended" : comm));
}

void SerialExecutor::leave() noexcept { launch::leave(*place_->inside); }

}  // namespace accelmgr::launch
