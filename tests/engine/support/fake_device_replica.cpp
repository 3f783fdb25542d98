#include "engine/support/fake_device_replica.hpp"

#include <stdexcept>
#include <utility>

#include "engine/replica/model.hpp"
#include "engine/session/kernels.hpp"
#include "engine/support/plain_replica.hpp"

namespace accelmgr::test {
namespace {

constexpr double timeout_s = 60;  // Then the device hangs.

std::shared_ptr<FakeCuda> shared_fake() {
  static std::weak_ptr<FakeCuda> shared;
  auto fake = shared.lock();
  if (fake == nullptr) shared = fake = std::make_shared<FakeCuda>(FakeCuda::Execution::threads);
  return fake;
}

}  // namespace

/// A micro-batch, copied into memory that this object owns.
struct FakeDeviceReplica::Batch {
  explicit Batch(std::span<const replica::Field> batch) : fields(batch.begin(), batch.end()) {
    for (auto& field : fields) {
      auto bytes = size_of(field.dtype);
      for (const auto size : field.shape) bytes *= static_cast<std::size_t>(size);
      field.data = memory.emplace_back(field.data, field.data + bytes).data();
    }
  }
  std::vector<replica::Field> fields;
  std::vector<std::vector<std::byte>> memory;
};

FakeDeviceReplica::~FakeDeviceReplica() {
  team_member_.reset();  // What it has under way may wait for ranks that are gone.
  if (copies_) leave();
}

void FakeDeviceReplica::bind(const replica::Binding& to) {
  fake_ = shared_fake();
  binding_.emplace(to);
  device_.emplace(FakeCuda::runtime(), 0);
  compute_ = device_->make_stream();
  const auto targets = allocate_parameters(to.places);
  for (std::size_t i = 0; i < network_->parameters().size(); ++i) {
    sums_.push_back(device_->allocate(network_->parameters()[i].gradient.size()));
    rounded_.push_back(device_->allocate(to.manifest.tensors[i].slab_bytes()));
  }
  summed_.resize(sums_.size());
  upload_.emplace(*device_, to, targets, compute_.get());
  copies_.emplace(*device_, to, compute_.get(), timeout_s);
}

replica::TeamMember* FakeDeviceReplica::team_member() {
  if (!nccl_) return nullptr;
  team_member_.emplace(*device_, nccl_(), *copies_, *upload_, binding_->progress, timeout_s);
  return &*team_member_;
}

/// Binds the parameters of the network to memory of the device.
std::vector<std::byte*> FakeDeviceReplica::allocate_parameters(std::span<const replica::Place> places) {
  auto& parameters = network_->parameters();
  std::vector<std::byte*> targets;
  std::vector<std::byte*> values;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto bytes = size_of(parameters[i].dtype);
    const auto& entry = binding_->manifest.tensors[i];
    targets.push_back(nullptr);
    if (entry.shares < 0) targets.back() = memory_.emplace_back(device_->allocate(entry.count * bytes)).get();
    values.push_back(entry.shares < 0
                         ? targets.back()
                         : values[static_cast<std::size_t>(entry.shares)] + entry.shared_offset * bytes);
    parameters[i].bind_values({values.back(), places[i].strides});
  }
  return targets;
}

// After a failure or a cancellation kernels are skipped: the memory that they would write keeps its values.
void FakeDeviceReplica::launch(std::function<void()> kernel) {
  fake_->launch(compute_.get(), [this, kernel = std::move(kernel)] {
    if (failure_ || network_->cancelled()) return;
    try {
      kernel();
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void FakeDeviceReplica::leave() {
  network_->cancel(true);
  device_->settle(compute_.get());
  if (!device_->given_up()) network_->cancel(false);
}

void FakeDeviceReplica::begin_attempt() {
  leave();
  totals_ = {};
  failure_ = nullptr;
  summed_.assign(summed_.size(), 0);
  if (!copies_->begin_attempt()) throw std::logic_error("no work of the transport was left");
}

void FakeDeviceReplica::run(std::span<const replica::Field> batch, double divisor) {
  const auto kept = std::make_shared<const Batch>(batch);
  launch([this, kept, divisor] { add_to(totals_, network_->forward(kept->fields), divisor); });
  binding_->progress.backward_begins();
  launch([this, divisor] { network_->backward(1 / divisor); });
  const auto& parameters = network_->parameters();
  for (std::size_t i = parameters.size(); i-- > 0;) {
    if (!network_->uses(i, batch)) continue;
    launch_sum(i);
    if (copies_->rounds(i)) {
      launch([this, i] {
        const auto& entry = binding_->manifest.tensors[i];
        session::best_kernels().capture_copy(rounded_[i].get(), sums_[i].get(), entry.elements(),
                                             entry.types);
      });
    }
    copies_->written(i, (copies_->rounds(i) ? rounded_ : sums_)[i].get());
  }
}

/// The first gradient of an attempt is copied, further ones are added, as the session does it for others.
void FakeDeviceReplica::launch_sum(std::size_t parameter) {
  const bool add = std::exchange(summed_[parameter], 1) != 0;
  launch([this, parameter, add] {
    network_->parameters()[parameter].sum_gradient(sums_[parameter].get(), add);
  });
}

replica::Totals FakeDeviceReplica::collect() {
  const bool done = copies_->finish();
  if (!done) return {};
  if (failure_) std::rethrow_exception(failure_);
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const auto& entry = binding_->manifest.tensors[i];
    if (summed_[i] != 0)
      binding_->gradients.magnitude(
          i, session::best_kernels().largest(sums_[i].get(), entry.elements(), entry.types.gradient));
  }
  // In a session all memory can be registered.
  if (!binding_->gradient_places.slab().empty() && fake_->unregistered_copies() > 0)
    throw std::logic_error("a copy was slow, because its memory is not registered");
  return totals_;
}

void FakeDeviceReplica::save(const replica::State& to) { save_network(*network_, binding_->manifest, to); }

void FakeDeviceReplica::load(const replica::ConstState& from) {
  leave();
  load_network(*network_, binding_->manifest, from);
}

}  // namespace accelmgr::test
