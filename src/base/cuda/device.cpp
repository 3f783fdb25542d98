#include "base/cuda/device.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>

#include "base/cuda/polling.hpp"

namespace accelmgr::device {
Device::Device(const Runtime& runtime, int id) : runtime_(runtime), id_(id) {
  check("cudaSetDevice", runtime_.set_device(id));
}

std::string Device::pci_bus_id() const {
  std::array<char, 32> text{};
  check("cudaDeviceGetPCIBusId", runtime_.pci_bus_id(text.data(), static_cast<int>(text.size()), id_));
  return text.data();
}

void Device::check(const char* function, Code code) const {
  if (code == code::success) return;
  runtime_.last_error();  // Resets the error: the next caller must not take it for its own.
  throw DeviceError(
      fmt::format("{}: {} ({}): {}", function, runtime_.error_name(code), code, runtime_.error_text(code)),
      function, code);
}

void Device::check_usable(const char* function) const {
  if (given_up_)
    throw DeviceError(fmt::format("{}: the device hangs and was given up", function), function,
                      code::not_ready);
}

Stream Device::make_stream() const {
  check_usable("cudaStreamCreateWithFlags");
  StreamHandle stream = nullptr;
  check("cudaStreamCreateWithFlags", runtime_.stream_create(&stream, stream_non_blocking));
  return {stream, {this}};
}

Event Device::make_event() const {
  check_usable("cudaEventCreateWithFlags");
  EventHandle event = nullptr;
  check("cudaEventCreateWithFlags", runtime_.event_create(&event, event_without_timing));
  return {event, {this}};
}

Memory Device::allocate(std::size_t bytes) const {
  check_usable("cudaMalloc");
  void* memory = nullptr;
  check("cudaMalloc", runtime_.allocate(&memory, bytes));
  return {static_cast<std::byte*>(memory), {this}};
}

HostMemory Device::allocate_on_host(std::size_t bytes) const {
  check_usable("cudaHostAlloc");
  void* memory = nullptr;
  check("cudaHostAlloc", runtime_.host_allocate(&memory, bytes, host_default));
  return {static_cast<std::byte*>(memory), {this}};
}

Registration Device::register_pages(std::span<std::byte> memory, unsigned flags) const {
  check_usable("cudaHostRegister");
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto before = address % page;
  const auto bytes = (before + memory.size() + page - 1) / page * page;
  auto* begin = memory.data() - before;
  check("cudaHostRegister", runtime_.host_register(begin, bytes, flags));
  return {begin, {this}};
}

void Device::record(const Event& event, StreamHandle stream) const {
  check_usable("cudaEventRecord");
  check("cudaEventRecord", runtime_.event_record(event.get(), stream));
}

void Device::record_in_graph(const Event& event, StreamHandle stream) const {
  check_usable("cudaEventRecordWithFlags");
  check("cudaEventRecordWithFlags", runtime_.event_record_with_flags(event.get(), stream, event_of_a_graph));
}

void Device::wait(StreamHandle stream, const Event& event) const {
  check_usable("cudaStreamWaitEvent");
  check("cudaStreamWaitEvent", runtime_.stream_wait_event(stream, event.get(), 0));
}

void Device::copy(std::byte* to, const std::byte* from, std::size_t bytes, Direction direction,
                  StreamHandle stream) const {
  check_usable("cudaMemcpyAsync");
  check("cudaMemcpyAsync", runtime_.copy(to, from, bytes, direction, stream));
}

void Device::zero(std::byte* memory, std::size_t bytes, StreamHandle stream) const {
  check_usable("cudaMemsetAsync");
  check("cudaMemsetAsync", runtime_.fill(memory, 0, bytes, stream));
}

bool Device::happened(const Event& event) const {
  check_usable("cudaEventQuery");
  const auto code = runtime_.event_query(event.get());
  if (code == code::not_ready) {
    runtime_.last_error();  // Some drivers keep this code too.
    return false;
  }
  check("cudaEventQuery", code);
  return true;
}

bool Device::wait(const Event& event, base::Waiter& waiter, double timeout_s) {
  const auto waited = poll_until([&] { return happened(event); }, [&] { return waiter.wanted(); }, timeout_s);
  if (waited != Waited::late) return waited == Waited::done;
  give_up();
  throw DeviceError(
      fmt::format("cudaEventQuery: the device hangs: it has not done its work within {} s", timeout_s),
      "cudaEventQuery", code::not_ready);
}

void Device::look() const {
  const auto stream = make_stream();
  const auto event = make_event();
  record(event, stream.get());
  static_cast<void>(happened(event));
}

void Device::settle(StreamHandle stream, double within_s) noexcept {
  if (given_up_) return;
  try {
    const auto idle = make_event();
    record(idle, stream);
    if (poll_until([&] { return happened(idle); }, [] { return true; }, within_s) != Waited::done) give_up();
  } catch (const std::exception&) {
    // A device that failed does no further work.
  }
}

}  // namespace accelmgr::device
