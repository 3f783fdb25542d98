#include "engine/support/device_replica.hpp"

#include <chrono>
#include <cstring>

#include "engine/replica/model.hpp"
#include "engine/replica/strided.hpp"
#include "engine/support/plain_replica.hpp"

namespace accelmgr::test {
namespace {

constexpr std::chrono::milliseconds sign_of_life{20};

}  // namespace

DeviceReplica::~DeviceReplica() {
  if (!device_.joinable()) return;
  leave();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  device_.join();
}

void DeviceReplica::bind(const session::Manifest& manifest, std::span<const replica::Place> places,
                         replica::Sink& sink) {
  manifest_ = &manifest;
  master_.assign(places.begin(), places.end());
  sink_ = &sink;
  sums_.resize(network_->parameters().size());
  device_ = std::thread([this] { compute_until_end(); });
}

void DeviceReplica::seed(std::uint64_t seed) { network_->generator().seed(seed); }

void DeviceReplica::leave() {
  std::unique_lock lock(mutex_);
  works_.clear();
  network_->cancel(true);
  changed_.wait(lock, [&] { return idle(); });
  network_->cancel(false);
}

void DeviceReplica::begin_attempt() {
  leave();
  totals_ = {};
  failure_ = nullptr;
  for (auto& sum : sums_) sum.clear();
}

void DeviceReplica::load_parameters() {
  auto& parameters = network_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    replica::copy_strided(parameters[i].values, parameters[i].strides, master_[i].data, master_[i].strides,
                          parameters[i].shape, size_of(parameters[i].dtype));
}

void DeviceReplica::run(std::span<const replica::Field> batch, double divisor) {
  Work work{.fields = {batch.begin(), batch.end()}, .memory = {}, .divisor = divisor};
  for (auto& field : work.fields) {
    auto bytes = size_of(field.dtype);
    for (const auto size : field.shape) bytes *= static_cast<std::size_t>(size);
    field.data = work.memory.emplace_back(field.data, field.data + bytes).data();
  }
  sink_->backward_begins();
  {
    const std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void DeviceReplica::compute_until_end() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || !works_.empty(); });
    if (ending_) return;
    const auto work = std::move(works_.front());
    works_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      compute(work);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !failure_) failure_ = failure;
    busy_ = false;
    changed_.notify_all();
  }
}

void DeviceReplica::compute(const Work& work) {
  add_to(totals_, network_->forward(work.fields), work.divisor);
  network_->backward(1 / work.divisor);
  auto& parameters = network_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].used) continue;
    const bool add = !sums_[i].empty();
    sums_[i].resize(parameters[i].gradient.size());
    parameters[i].sum_gradient(sums_[i].data(), add);
  }
}

replica::Totals DeviceReplica::collect() {
  {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, sign_of_life, [&] { return idle(); })) {
      lock.unlock();
      if (!sink_->wanted()) {
        leave();
        return {};
      }
      lock.lock();
    }
    if (failure_) std::rethrow_exception(failure_);
  }
  for (std::size_t i = sums_.size(); i-- > 0;)
    if (!sums_[i].empty()) sink_->capture(i, sums_[i].data());
  return totals_;
}

void DeviceReplica::save(const replica::State& to) { save_network(*network_, *manifest_, to); }

void DeviceReplica::load(const replica::ConstState& from) {
  leave();
  load_network(*network_, *manifest_, from);
}

}  // namespace accelmgr::test
