// The fake runs the tests of the transport in both of its ways.
#include "engine/support/fake_cuda.hpp"
#include "tested_runtime.hpp"

namespace accelmgr::test {
namespace {

template <FakeCuda::Execution execution>
class Fake final : public TestedRuntime {
 public:
  Fake() {
    calls = FakeCuda::runtime();
#ifdef __SANITIZE_THREAD__  // It makes copies slow by itself.
    slow_copy_bytes = std::size_t{1} << 20;
#else
    slow_copy_bytes = std::size_t{4} << 20;
#endif
  }
  void queue_illegal_write(device::StreamHandle stream) override {
    fake_.break_after(0, device::code::illegal_address);
    fake_.launch(stream, [] {});
  }
  std::function<void()> graph_of(device::StreamHandle stream, const std::function<void()>& body) override {
    fake_.begin_graph(stream);
    body();
    return [this, stream, graph = fake_.end_graph(stream)] { fake_.launch(stream, *graph); };
  }

 private:
  FakeCuda fake_{execution};
};

template <FakeCuda::Execution execution>
constexpr auto open = []() -> std::unique_ptr<TestedRuntime> { return std::make_unique<Fake<execution>>(); };

}  // namespace

std::vector<RuntimeKind> tested_runtimes() {
  return {{"FakeStepped", open<FakeCuda::Execution::stepped>},
          {"FakeThreads", open<FakeCuda::Execution::threads>}};
}

}  // namespace accelmgr::test
