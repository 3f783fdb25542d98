// A replica computed by libtorch on a GPU. Parameters, gradients and buffers are in memory of torch on the
// device; src/engine/device copies from and to the session.
//
//   input stream     batch 0, batch 1 ..
//   compute stream   waits for the parameters and batch 0, forward, backward, waits for batch 1, ..
//   copy stream      buckets of gradients, as they fill in the last backward
//   runner's thread  queues all that; collect() awaits gradients, then loss and scalars, which are copied
//                    behind the last kernel
//
// Nothing is read from the device before collect(), unless the model does it. Sparse gradients may be rounded
// in another order than in CPU memory: autograd adds the entries of a row to the micro-batches before, one by
// one.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/model.hpp"
#include "base/cuda/device.hpp"
#include "engine/device/batch_upload.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/device/pinned_pages.hpp"
#include "engine/device/team_member.hpp"
#include "engine/replica/replica.hpp"
#include "libtorch/handle/attempt_numbers.hpp"
#include "libtorch/handle/checked_model.hpp"
#include "libtorch/handle/gradient_hooks.hpp"

namespace accelmgr::libtorch {

/// A stream of torch, and its handle for the transport.
struct TorchStream {
  /// On the CPU torch has no streams and computes at once; the transport gets a stream of its own.
  TorchStream(const device::Device& device, at::Device torch_device);

  c10::Stream stream;
  device::Stream own;
  device::StreamHandle handle;
};

/// Errors of the device are device::DeviceError.
class CudaReplica final : public replica::Replica {
 public:
  /// Copies go through `runtime`. With torch's CPU as `device` and a fake of the runtime, a test proves their
  /// order. Throws DeviceError, and errors of torch.
  /// `nccl` fills the table for teams; without it the replica has no part in them. It may throw UsageError.
  CudaReplica(const Config& config, std::unique_ptr<Model> model, at::Device device,
              const device::Runtime& runtime, std::function<device::Nccl()> nccl = nullptr);
  ~CudaReplica() override;

  replica::Description describe() override { return model_.describe(); }
  void bind(const replica::Binding& to) override;
  void seed(std::uint64_t seed) override;
  void begin_attempt() override;
  void load_parameters() override { stale_ = true; }
  void run(std::span<const replica::Field> batch, double divisor) override;
  replica::Totals collect() override;
  void save(const replica::State& to) override;
  void load(const replica::ConstState& from) override;
  replica::TeamMember* team_member() override;

 private:
  template <class Body>
  decltype(auto) on_device(Body&& body);
  std::vector<std::byte*> place_parameters(std::span<const replica::Place> places);
  void move_buffers();
  std::optional<Batch> upload(std::span<const replica::Field> fields);
  void complete(std::size_t index, const at::Tensor& parameter);
  void bring_parameters();
  void queue_numbers();
  void tell_magnitudes(const double* magnitude);
  void await_buffers();
  at::Tensor on_device_as(const at::Tensor& tensor, const session::BufferEntry& entry) const;

  const Config& config_;
  at::Device torch_device_;
  device::Device device_;
  TorchStream compute_, input_;
  std::vector<at::Generator> generators_;
  CheckedModel model_;
  std::optional<replica::Binding> binding_;
  std::vector<at::Tensor> values_;  ///< Memory of the parameters that have their own; undefined for others.
  device::PinnedPages staged_buffers_;  ///< All buffers, placed as in the manifest.
  device::Event buffers_copied_;
  bool stale_ = false;  ///< Parameters must be loaded.
  // These belong to the attempt under way.
  AttemptNumbers numbers_;
  at::Tensor gathered_;  ///< The values of all numbers, and where they are copied to.
  std::span<const std::byte> numbers_read_;
  std::vector<at::Tensor> gradients_;  ///< Of each parameter: what is copied; undefined if nothing is.
  bool collecting_ = false;
  bool left_ = false;  ///< The attempt ended before the work of an earlier one did.
  std::optional<GradientHooks> hooks_;
  std::optional<device::ParameterUpload> parameter_upload_;
  std::optional<device::BatchUpload> batch_upload_;
  std::optional<device::Results> results_;
  std::optional<device::GradientCopies> gradient_copies_;
  std::function<device::Nccl()> nccl_;
  std::optional<device::TeamMember> team_member_;
};

}  // namespace accelmgr::libtorch
