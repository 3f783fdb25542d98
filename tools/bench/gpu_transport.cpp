// Measures the transport between a GPU and a session: how fast gradients come to the slab and parameters go
// to the device, and how much of the copies is left when the device has computed. `tools/bench/gpu` runs it.
//
// The device computes nothing real: copies from one part of its memory to another take its time, at the pace
// of a backward pass.
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <optional>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/runner/gradients.hpp"
#include "engine/session/manifest.hpp"
#include "gpu_device.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr std::size_t MiB = std::size_t{1} << 20;
/// How many bytes of gradients a backward pass completes in a second.
constexpr double pace = 15e9;
constexpr double timeout_s = 60;

struct Plan {
  std::vector<std::size_t> sizes;    ///< Of all gradients together.
  std::vector<std::size_t> buckets;  ///< Of one copy.
  std::size_t tensor, scratch;       ///< Of one parameter; of a copy within the device.
  int repetitions;
};

Plan plan_for(bool fake, bool quick) {
  if (fake) return {{2 * MiB, 8 * MiB}, {MiB / 4, MiB}, MiB / 2, MiB / 4, quick ? 1 : 3};
  // 475 MiB are the gradients of 124 million parameters.
  if (quick) return {{64 * MiB, 475 * MiB}, {4 * MiB, 25 * MiB}, 4 * MiB, 128 * MiB, 3};
  return {{4 * MiB, 64 * MiB, 475 * MiB, 1024 * MiB},
          {1 * MiB, 4 * MiB, 25 * MiB, 100 * MiB},
          4 * MiB,
          128 * MiB,
          15};
}

session::Manifest manifest_of(std::size_t bytes, std::size_t tensor_bytes) {
  session::Manifest manifest;
  for (std::size_t at = 0; at < bytes; at += tensor_bytes) {
    const std::uint64_t count = std::min(tensor_bytes, bytes - at) / sizeof(float);
    manifest.tensors.push_back({.name = std::to_string(manifest.tensors.size()),
                                .aliases = {},
                                .shape = {static_cast<std::int64_t>(count)},
                                .count = count});
  }
  return manifest;
}

session::Session make_session(session::Manifest& manifest) {
  session::Extent extent{.ranks = 1, .bytes = manifest.place_tensors()};
  extent.tensors = manifest.tensors.size();
  extent.manifest_bytes = session::manifest_bytes(manifest);
  auto session = session::Session::create(extent, extent.ranks, 1);
  session.publish();
  return session;
}

/// As a runner maps it: the parameters are read-only.
session::Session attach(const session::Session& session) {
  std::vector<base::UniqueFd> fds;
  for (const int fd : session.fds()) fds.push_back(base::duplicate(fd));
  return session::Session::attach(std::move(fds), 0, true);
}

/// Gradients come to the slab of a session.
class SlabSink final : public replica::GradientSink,
                       public replica::GradientPlaces,
                       public replica::ParameterSource,
                       public replica::Progress {
 public:
  SlabSink(session::Session& session, const session::Manifest& manifest)
      : manifest_(manifest), gradients_({session, 0}, manifest) {}
  replica::Binding binding(std::span<const replica::Place> places = {}) {
    return {manifest_, places, *this, *this, *this, *this};
  }
  void begin() { gradients_.begin(++attempt_); }
  void capture(std::size_t index, const void* gradient) override { gradients_.capture(index, gradient); }
  std::span<std::byte> slab() override { return gradients_.slab(); }
  std::byte* place_of(std::size_t index) override { return gradients_.place_of(index); }
  void arrived(std::span<const std::size_t> indices) override { gradients_.arrived(indices); }
  void backward_begins() override {}
  bool last_micro_batch() override { return true; }
  bool wanted() override { return true; }

 private:
  const session::Manifest& manifest_;
  runner::Gradients gradients_;
  std::uint64_t attempt_ = 0;
};

class Bench {
 public:
  Bench(device::Device& device, const Plan& plan, std::size_t bytes)
      : device_(device),
        plan_(plan),
        bytes_(bytes),
        manifest_(manifest_of(bytes, plan.tensor)),
        owner_(make_session(manifest_)),
        session_(attach(owner_)) {
    for (const auto& entry : manifest_.tensors) targets_.push_back(tensors_.get() + entry.offset);
    device.copy(tensors_.get(), owner_.parameters(), bytes, device::Direction::to_device, compute_.get());
    finish(compute_.get());
  }

  void measure() {
    registration_.emplace(device_.register_pages(slab(), device::register_read_write));
    raw("registered", "gradients", device::Direction::to_host, session_.slab(0));
    registration_.reset();
    raw("unregistered", "gradients", device::Direction::to_host, session_.slab(0));
    registration_.emplace(device_.register_pages({owner_.parameters(), bytes_}, device::register_read_write));
    raw("registered", "parameters", device::Direction::to_device, owner_.parameters());
    registration_.reset();
    raw("unregistered", "parameters", device::Direction::to_device, owner_.parameters());
    upload();
    const double step_ms = copy_within_device_ms();
    SlabSink sink(session_, manifest_);
    device::GradientCopies copies(device_, sink.binding(), compute_.get(), timeout_s);
    const auto attempt = [&](int steps) {
      sink.begin();
      if (!copies.begin_attempt()) throw std::logic_error("an attempt was left, and this one is unwanted");
      compute(steps, [&](std::size_t i) { copies.written(i, targets_[i]); });
      copies.finish();
    };
    emit("transport", "gradients", "bandwidth", gb_per_s(median_ms([&] { attempt(0); })), "GB/s");
    exposed(step_ms, attempt);
  }

 private:
  std::span<std::byte> slab() { return {session_.slab(0), bytes_}; }
  double gb_per_s(double ms) const { return double(bytes_) / ms / 1e6; }
  void emit(const char* name, const char* in_case, const char* metric, double value, const char* unit,
            std::size_t bucket = 0) const {
    std::vector<std::pair<std::string, double>> more{{"bytes", double(bytes_)}};
    if (bucket != 0) more.emplace_back("bucket_bytes", double(bucket));
    bench::emit(name, in_case, metric, value, unit, more);
  }

  /// Waits until the stream is idle.
  void finish(device::StreamHandle stream) {
    device_.record(done_, stream);
    while (!device_.happened(done_)) sched_yield();
  }
  double median_ms(const std::function<void()>& work) const {
    std::vector<double> times;
    for (int i = -2; i < plan_.repetitions; ++i) {
      const auto begin = base::now_ns();
      work();
      if (i >= 0) times.push_back(double(base::now_ns() - begin) / 1e6);
    }
    return bench::median(times);
  }

  /// Copies in parts of each size of a bucket, without the transport.
  void raw(const char* name, const char* in_case, device::Direction direction, std::byte* host) {
    for (const auto bucket : plan_.buckets) {
      if (bucket > bytes_) continue;
      const auto ms = median_ms([&] {
        for (std::size_t at = 0; at < bytes_; at += bucket) {
          auto *here = host + at, *there = tensors_.get() + at;
          const bool up = direction == device::Direction::to_device;
          device_.copy(up ? there : here, up ? here : there, std::min(bucket, bytes_ - at), direction,
                       copies_.get());
        }
        finish(copies_.get());
      });
      emit(name, in_case, "bandwidth", gb_per_s(ms), "GB/s", bucket);
    }
  }

  void upload() {
    SlabSink sink(session_, manifest_);
    for (const bool read_only : {false, true}) {
      auto& session = read_only ? session_ : owner_;
      std::vector<replica::Place> places;
      for (const auto& entry : manifest_.tensors)
        places.push_back({session.parameters() + entry.offset, {1}});
      device::ParameterUpload upload(device_, sink.binding(places), targets_, compute_.get());
      const auto ms = median_ms([&] {
        upload.load();
        finish(compute_.get());
      });
      emit(read_only ? "read_only" : "transport", "parameters", "bandwidth", gb_per_s(ms), "GB/s");
    }
  }

  void copy_within_device() {
    device_.copy(scratch_[0].get(), scratch_[1].get(), plan_.scratch, device::Direction::on_device,
                 compute_.get());
  }
  double copy_within_device_ms() {
    constexpr int count = 100;
    return median_ms([&] {
             for (int i = 0; i < count; ++i) copy_within_device();
             finish(compute_.get());
           }) /
           count;
  }
  /// Gradients are complete one after the other, the last parameter's first. Each takes `steps` copies.
  void compute(int steps, const std::function<void(std::size_t)>& written) {
    for (std::size_t i = targets_.size(); i-- > 0;) {
      for (int step = 0; step < steps; ++step) copy_within_device();
      written(i);
    }
  }
  /// How much longer an attempt takes than the same computing alone.
  void exposed(double step_ms, const std::function<void(int)>& attempt) {
    const double tensor_ms = double(plan_.tensor) / pace * 1e3;
    const int steps = std::max(1, int(tensor_ms / step_ms));
    const auto alone = median_ms([&] {
      compute(steps, [](std::size_t) {});
      finish(compute_.get());
    });
    emit("transport", "exposed", "time", median_ms([&] { attempt(steps); }) - alone, "ms");
    emit("transport", "exposed", "compute", alone, "ms");
  }

  device::Device& device_;
  const Plan& plan_;
  std::size_t bytes_;
  session::Manifest manifest_;
  session::Session owner_, session_;
  device::Stream compute_ = device_.make_stream(), copies_ = device_.make_stream();
  device::Event done_ = device_.make_event();
  device::Memory tensors_ = device_.allocate(bytes_);  ///< Parameters, and gradients too.
  std::array<device::Memory, 2> scratch_{device_.allocate(plan_.scratch), device_.allocate(plan_.scratch)};
  std::vector<std::byte*> targets_;  ///< Of each parameter, in it.
  std::optional<device::Registration> registration_;
};

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] {
    const auto gpu = [] {
      try {
        return bench::open_gpu();
      } catch (const Error& error) {
        throw UsageError(fmt::format("this measures a GPU, and there is none: {}", error.what()));
      }
    }();
    // Each line has one number, and this one the name of the device besides.
    fmt::print(R"({{"case": "machine", "metric": "cuda_driver", "value": {}, "unit": "", "device": "{}"}})"
               "\n",
               gpu.driver_version, gpu.name);
    bench::emit("ours", "machine", "cuda_runtime", gpu.runtime_version, "");
    device::Device device(gpu.runtime, 0);
    const auto plan = plan_for(gpu.is_fake(), quick);
    for (const auto bytes : plan.sizes) Bench(device, plan, bytes).measure();
  });
}
