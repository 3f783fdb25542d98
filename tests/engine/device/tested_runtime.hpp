// The runtimes that the tests of transport_test.cpp run on. Each program names its own: device_test the fake,
// accelmgr_gpu_tests that of a GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <vector>

#include "base/cuda/runtime.hpp"

namespace accelmgr::test {

class TestedRuntime {
 public:
  virtual ~TestedRuntime() = default;
  /// Queues work that writes to an illegal address. The device is of no use afterwards.
  virtual void queue_illegal_write(device::StreamHandle stream) = 0;
  /// Records what `body` queues on the stream as a graph. Returns what launches it.
  virtual std::function<void()> graph_of(device::StreamHandle stream, const std::function<void()>& body) = 0;

  device::Runtime calls{};
  /// A copy of so many bytes within the device takes about half a millisecond.
  std::size_t slow_copy_bytes = 0;
};

struct RuntimeKind {
  const char* name;
  /// Throws if there is no such runtime.
  std::unique_ptr<TestedRuntime> (*open)();
};
inline std::ostream& operator<<(std::ostream& out, const RuntimeKind& kind) { return out << kind.name; }

std::vector<RuntimeKind> tested_runtimes();

}  // namespace accelmgr::test
