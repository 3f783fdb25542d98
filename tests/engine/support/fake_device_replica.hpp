// A replica of a Network on the transport for devices (src/engine/device). The device is host memory with a
// fake of CUDA's runtime: parameters, gradients and their sums are in its allocations, and forward, backward
// and adding are kernels on a stream.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/cuda/device.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/device/team_member.hpp"
#include "engine/support/fake_cuda.hpp"
#include "engine/support/network.hpp"

namespace accelmgr::test {

class FakeDeviceReplica final : public replica::Replica {
 public:
  explicit FakeDeviceReplica(std::unique_ptr<Network> network) : network_(std::move(network)) {}
  ~FakeDeviceReplica() override;

  replica::Description describe() override { return network_->description(); }
  void bind(const replica::Binding& to) override;
  void seed(std::uint64_t seed) override { network_->generator().seed(seed); }
  void begin_attempt() override;
  void load_parameters() override { upload_->load(); }
  void run(std::span<const replica::Field> batch, double divisor) override;
  replica::Totals collect() override;
  void save(const replica::State& to) override;
  void load(const replica::ConstState& from) override;

  /// Makes the part in teams from `table`; without it there is none. Call it before bind(). `table` may throw
  /// UsageError.
  void use_nccl(std::function<device::Nccl()> table) { nccl_ = std::move(table); }
  replica::TeamMember* team_member() override;

 private:
  struct Batch;

  std::vector<std::byte*> allocate_parameters(std::span<const replica::Place> places);
  void launch_sum(std::size_t parameter);
  void launch(std::function<void()> kernel);
  void leave();

  std::unique_ptr<Network> network_;
  // Kernels write these. The runner's thread reads them when the compute stream is done.
  replica::Totals totals_;
  std::exception_ptr failure_;
  /// All replicas of this process share it; its streams are threads. Members below use it, and the kernels
  /// use members above.
  std::shared_ptr<FakeCuda> fake_;
  std::optional<replica::Binding> binding_;
  std::optional<device::Device> device_;
  device::Stream compute_;
  std::vector<device::Memory> memory_;   ///< Values of the parameters.
  std::vector<device::Memory> sums_;     ///< Gradients of the attempt.
  std::vector<device::Memory> rounded_;  ///< The same for slabs of bfloat16.
  std::vector<char> summed_;             ///< Whether the sum of a parameter has begun.
  std::optional<device::ParameterUpload> upload_;
  std::optional<device::GradientCopies> copies_;
  std::function<device::Nccl()> nccl_;
  std::optional<device::TeamMember> team_member_;
};

}  // namespace accelmgr::test
