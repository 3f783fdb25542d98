#include "libtorch/handle/cuda_replica.hpp"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/StreamGuard.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "engine/session/layout.hpp"
#include "libtorch/tensor/convert.hpp"
#include "libtorch/tensor/generator.hpp"
#include "libtorch/tensor/torch_versions.hpp"

namespace accelmgr::libtorch {
namespace {

constexpr std::size_t part_alignment = 64;
constexpr std::size_t usual_number_bytes = std::size_t{1} << 16;

std::size_t bytes_of(const replica::Field& field) {
  auto bytes = size_of(field.dtype);
  for (const auto size : field.shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

std::byte* memory_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// The largest magnitude of each tensor: Inf or NaN if one of its elements is.
at::Tensor largest_magnitudes(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> real;
  for (const auto& tensor : tensors)
    real.push_back(tensor.numel() == 0   ? tensor.new_zeros(1)
                   : tensor.is_complex() ? at::view_as_real(tensor)
                                         : tensor);
  return at::stack(at::_foreach_norm(real, std::numeric_limits<double>::infinity()));
}

/// The gradient in bfloat16; a complex number is two.
at::Tensor rounded(const at::Tensor& gradient) {
  const auto real = gradient.is_complex() ? at::view_as_real(gradient) : gradient;
  return real.to(at::kBFloat16);
}

/// For waits whose result is needed even if the attempt is over: what follows relies on it.
class SignsOfLife final : public base::Waiter {
 public:
  explicit SignsOfLife(base::Waiter& waiter) : waiter_(waiter) {}
  bool wanted() override {
    waiter_.wanted();
    return true;
  }

 private:
  base::Waiter& waiter_;
};

}  // namespace

TorchStream::TorchStream(const device::Device& device, at::Device torch_device)
    : stream(c10::impl::VirtualGuardImpl(torch_device.type()).getNewStream(torch_device)) {
  if (torch_device.is_cpu()) own = device.make_stream();
  handle = own ? own.get() : static_cast<device::StreamHandle>(tensor::native_handle(stream));
}

CudaReplica::CudaReplica(const Config& config, std::unique_ptr<Model> model, at::Device device,
                         const device::Runtime& runtime, std::function<device::Nccl()> nccl)
    : config_(config),
      torch_device_(device),
      device_(runtime, device.has_index() ? device.index() : 0),
      compute_(device_, device),
      input_(device_, device),
      generators_(tensor::default_generators(device)),
      model_(config, std::move(model)),
      buffers_copied_(device_.make_event()),
      nccl_(std::move(nccl)) {}

CudaReplica::~CudaReplica() {
  team_member_.reset();  // What it has under way may wait for ranks that are gone.
  device_.settle(input_.handle);
  if (gradient_copies_) gradient_copies_->settle();  // Before the gradients are freed.
}

replica::TeamMember* CudaReplica::team_member() {
  if (!nccl_) return nullptr;
  team_member_.emplace(device_, nccl_(), *gradient_copies_, *parameter_upload_, binding_->progress,
                       config_.step_timeout);
  return &*team_member_;
}

/// Kernels of torch that `body` calls go to the compute stream.
template <class Body>
decltype(auto) CudaReplica::on_device(Body&& body) {
  return in_model([&]() -> decltype(auto) {
    const c10::StreamGuard guard(compute_.stream);
    return std::forward<Body>(body)();
  });
}

void CudaReplica::bind(const replica::Binding& to) {
  binding_.emplace(to);
  on_device([&] {
    const auto targets = place_parameters(to.places);
    move_buffers();
    device_.settle(compute_.handle);  // Torch may still fill the new memory, and copies take other streams.
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : model_.parameters()) parameters.push_back(tensor);
    gradients_.resize(parameters.size());
    hooks_.emplace(std::move(parameters),
                   [this](std::size_t index, const at::Tensor& parameter) { complete(index, parameter); });
    parameter_upload_.emplace(device_, to, targets, compute_.handle);
    batch_upload_.emplace(device_, to.progress, input_.handle, compute_.handle, config_.step_timeout);
    results_.emplace(device_, compute_.handle);
    results_->read({}, usual_number_bytes);  // Later it would have to wait for what is queued.
    gradient_copies_.emplace(device_, to, compute_.handle, config_.step_timeout);
  });
}

/// Moves the parameters to memory of the device. Returns the memory of each parameter that has its own.
std::vector<std::byte*> CudaReplica::place_parameters(std::span<const replica::Place> places) {
  std::vector<std::byte*> targets;
  for (std::size_t i = 0; i < model_.parameters().size(); ++i) {
    const auto& entry = binding_->manifest.tensors[i];
    const auto options = model_.parameters()[i].tensor.options().device(torch_device_).requires_grad(false);
    const bool own = entry.shares < 0;
    values_.push_back(own ? at::empty({static_cast<std::int64_t>(entry.count)}, options) : at::Tensor());
    targets.push_back(own ? memory_of(values_.back()) : nullptr);
    const auto& memory = own ? values_.back() : values_.at(static_cast<std::size_t>(entry.shares));
    model_.place_parameter(i, at::as_strided(memory, entry.shape, places[i].strides,
                                             own ? 0 : static_cast<std::int64_t>(entry.shared_offset)));
  }
  return targets;
}

void CudaReplica::move_buffers() {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
    const auto& tensor = model_.buffers()[i].tensor;
    const auto moved = at::empty(tensor.sizes(), tensor.options().device(torch_device_));
    tensor.set_data(moved.copy_(tensor));
    bytes = binding_->manifest.buffers[i].offset + binding_->manifest.buffers[i].bytes;
  }
  if (bytes > 0) staged_buffers_.grow(device_, bytes);
}

void CudaReplica::seed(std::uint64_t seed) { tensor::seed_generators(generators_, seed); }

void CudaReplica::begin_attempt() {
  left_ = !gradient_copies_->begin_attempt();
  if (left_) return;
  hooks_->begin();
  gradients_.assign(gradients_.size(), {});
  numbers_.clear();
  collecting_ = false;
}

/// Queues the parameters behind the first batch, which would wait for all of them otherwise: a device copies
/// in the order of the calls.
void CudaReplica::bring_parameters() {
  if (!stale_) return;
  try {
    parameter_upload_->load();
  } catch (...) {
    device_.settle(input_.handle);  // The batch is freed now.
    throw;
  }
  stale_ = false;
}

/// Queues the copies of a micro-batch. Empty if the attempt is over.
std::optional<Batch> CudaReplica::upload(std::span<const replica::Field> fields) {
  std::vector<device::BatchUpload::Part> parts;
  std::size_t bytes = 0;
  for (const auto& field : fields) {
    parts.push_back({.offset = bytes, .bytes = bytes_of(field)});
    bytes = session::align_up(bytes + parts.back().bytes, part_alignment);
  }
  const auto staged = batch_upload_->stage(bytes);
  if (!staged) return std::nullopt;
  std::vector<NamedTensor> tensors;
  {
    const c10::StreamGuard guard(
        input_.stream);  // Torch gives out memory that this stream may write at once.
    for (const auto& field : fields) {
      const auto options = at::TensorOptions().dtype(tensor::scalar_type(field.dtype)).device(torch_device_);
      tensors.push_back({field.name, at::empty(field.shape, options)});
    }
  }
  for (std::size_t i = 0; i < fields.size(); ++i) {
    parts[i].to = memory_of(tensors[i].tensor);
    if (parts[i].bytes > 0) std::memcpy(staged->data() + parts[i].offset, fields[i].data, parts[i].bytes);
  }
  std::erase_if(parts, [](const auto& part) { return part.bytes == 0; });
  try {
    batch_upload_->load(parts);
  } catch (...) {
    device_.settle(input_.handle);  // Some copies may be queued, and their memory is freed now.
    throw;
  }
  const c10::impl::VirtualGuardImpl torch(torch_device_.type());
  for (const auto& [name, tensor] : tensors)
    torch.recordDataPtrOnStream(tensor.storage().data_ptr(), compute_.stream);
  return Batch(std::move(tensors));
}

void CudaReplica::run(std::span<const replica::Field> batch, double divisor) {
  if (left_) return;
  gradient_copies_->begin_work();
  on_device([&] {
    const auto uploaded = upload(batch);
    if (!uploaded) return;
    bring_parameters();
    hooks_->begin_micro_batch();
    const auto outputs = model_.forward(*uploaded, divisor, torch_device_.type());
    numbers_.add(outputs, divisor);
    binding_->progress.backward_begins();
    hooks_->begin_backward();
    outputs.loss.backward();
    hooks_->end_backward();
  });
}

/// Autograd sums the gradients of micro-batches in `.grad`. The sums are copied in the last micro-batch; a
/// gradient that it does not touch is copied in collect(). A sparse gradient is made dense at once: further
/// ones are added to it.
void CudaReplica::complete(std::size_t index, const at::Tensor& parameter) {
  if (parameter.grad().is_sparse()) parameter.mutable_grad() = parameter.grad().to_dense();
  if (collecting_ ? gradients_[index].defined() : !binding_->progress.last_micro_batch()) return;
  const auto dense = dense_gradient(parameter);
  gradients_[index] = gradient_copies_->rounds(index) ? rounded(dense) : dense;
  gradient_copies_->written(index, memory_of(gradients_[index]));
}

/// Queues the copy of loss, scalars and the largest magnitude of each gradient behind the kernels that
/// compute them.
void CudaReplica::queue_numbers() {
  std::vector<at::Tensor> values, copied;
  for (const auto& tensor : numbers_.tensors())
    values.push_back(tensor.reshape({1}).to(at::TensorOptions().device(torch_device_).dtype(at::kDouble),
                                            /*non_blocking=*/true));
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (gradients_[i].defined()) copied.push_back(gradients_[i]);
  if (!copied.empty()) values.push_back(largest_magnitudes(copied).to(at::kDouble));
  if (values.empty()) return;
  gathered_ = at::cat(values);
  const device::Results::Part all[] = {{memory_of(gathered_), 0, gathered_.nbytes()}};
  numbers_read_ = results_->read(all, gathered_.nbytes());
}

/// Behind the loss and the scalars come the magnitudes.
void CudaReplica::tell_magnitudes(const double* magnitude) {
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (gradients_[i].defined()) binding_->gradients.magnitude(i, *magnitude++);
}

replica::Totals CudaReplica::collect() {
  if (left_) return {};
  gradient_copies_->begin_work();
  return on_device([&]() -> replica::Totals {
    bring_parameters();  // There was no batch. The others of a team wait for this rank.
    collecting_ = true;
    hooks_->finish();
    model_.check_places();
    queue_numbers();
    if (!gradient_copies_->finish()) return {};
    const auto* numbers = reinterpret_cast<const double*>(numbers_read_.data());
    const auto count = numbers_.tensors().size();
    tell_magnitudes(numbers + count);
    hooks_->begin();
    gradients_.assign(gradients_.size(), {});
    if (count == 0) return {};
    return numbers_.totals({numbers, count});
  });
}

void CudaReplica::await_buffers() {
  SignsOfLife waiter(binding_->progress);
  device_.wait(buffers_copied_, waiter, config_.step_timeout);
}

/// The tensor as the manifest describes it: on the device, row-major.
at::Tensor CudaReplica::on_device_as(const at::Tensor& tensor, const session::BufferEntry& entry) const {
  const auto dtype = tensor::scalar_type(entry.dtype);
  if (tensor.device() == torch_device_ && tensor.scalar_type() == dtype && tensor.sizes() == entry.shape)
    return tensor.contiguous();
  return at::empty(entry.shape, at::TensorOptions().dtype(dtype).device(torch_device_)).copy_(tensor);
}

void CudaReplica::save(const replica::State& to) {
  on_device([&] {
    if (to.buffers != nullptr && !staged_buffers_.span().empty()) {
      model_.restore_buffers();
      auto* const staged = staged_buffers_.span().data();
      std::vector<at::Tensor> copied;  // Kept until the copies are done.
      for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
        const auto& entry = binding_->manifest.buffers[i];
        copied.push_back(on_device_as(model_.buffers()[i].tensor, entry));
        if (entry.bytes > 0)
          device_.copy(staged + entry.offset, memory_of(copied.back()), entry.bytes,
                       device::Direction::to_host, compute_.handle);
      }
      device_.record(buffers_copied_, compute_.handle);
      await_buffers();
      for (const auto& entry : binding_->manifest.buffers)
        std::memcpy(to.buffers + entry.offset, staged + entry.offset, entry.bytes);
    }
    tensor::store_generators(generators_, to.generator);
  });
}

void CudaReplica::load(const replica::ConstState& from) {
  on_device([&] {
    if (!staged_buffers_.span().empty()) {
      model_.restore_buffers();
      auto* const staged = staged_buffers_.span().data();
      std::vector<at::Tensor> targets;
      for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
        const auto& entry = binding_->manifest.buffers[i];
        targets.push_back(on_device_as(model_.buffers()[i].tensor, entry));
        std::memcpy(staged + entry.offset, from.buffers + entry.offset, entry.bytes);
        if (entry.bytes > 0)
          device_.copy(memory_of(targets.back()), staged + entry.offset, entry.bytes,
                       device::Direction::to_device, compute_.handle);
      }
      device_.record(buffers_copied_, compute_.handle);
      await_buffers();
      for (std::size_t i = 0; i < targets.size(); ++i)
        if (const auto& tensor = model_.buffers()[i].tensor; !targets[i].is_alias_of(tensor))
          tensor.copy_(targets[i]);
    }
    tensor::load_generators(generators_, from.generator);
  });
}

}  // namespace accelmgr::libtorch
