// Measures what gradient capture costs: the backward of a chain of linear layers, plain and with the capture
// of a runner, in turns in one process, for several sizes of a weight.
//
// `plain` drops all gradients after backward; malloc keeps their pages, as in runners. `at_end` copies all
// gradients into the slab after backward. One thread; the weights have 128 MiB together.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <malloc.h>

#include <cmath>
#include <cstring>

#include "base/clock.hpp"
#include "engine/replica/model.hpp"
#include "engine/runner/gradients.hpp"
#include "engine/session/manifest.hpp"
#include "libtorch/handle/gradient_hooks.hpp"
#include "libtorch/tensor/convert.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr std::size_t sizes[] = {40 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
constexpr std::size_t all_bytes = std::size_t{128} << 20;
constexpr std::int64_t batch = 32;

/// A chain of layers whose weights have the same size.
struct Chain {
  explicit Chain(std::size_t bytes) {
    const auto width = static_cast<std::int64_t>(std::sqrt(double(bytes) / sizeof(float)));
    for (std::size_t i = 0; i < all_bytes / bytes; ++i)
      weights.push_back(at::randn({width, width}).div(std::sqrt(double(width))).requires_grad_());
    input = at::randn({batch, width});
  }
  at::Tensor loss() const {
    auto values = input;
    for (const auto& weight : weights) values = at::relu(at::linear(values, weight)).add(values);
    return values.pow(2).mean();
  }
  std::vector<at::Tensor> weights;
  at::Tensor input;
};

/// Captures gradients as a runner does.
class Slab final : public replica::GradientSink {
 public:
  Slab(session::Session& session, const session::Manifest& manifest) : gradients({session, 0}, manifest) {}
  void capture(std::size_t index, const void* gradient) override { gradients.capture(index, gradient); }

  runner::Gradients gradients;
};

double backward_ms(const at::Tensor& loss, const std::function<void(const at::Tensor&)>& backward) {
  const auto begin = base::now_ns();
  backward(loss);
  return double(base::now_ns() - begin) / 1e6;
}

/// Each chain has its own weights, because hooks stay on the parameters of the captured one.
void measure(std::size_t bytes, int rounds) {
  const Chain plain(bytes), captured(bytes);
  std::vector<NamedTensor> names;
  for (const auto& weight : captured.weights) names.push_back({std::to_string(names.size()), weight});
  auto model = replica::tensors_of(tensor::describe(names, {}));
  auto manifest = model.manifest;
  session::Extent extent{.ranks = 1, .bytes = manifest.place_tensors()};
  extent.tensors = manifest.tensors.size();
  extent.manifest_bytes = session::manifest_bytes(manifest);
  auto session = session::Session::create(extent, extent.ranks, 1);
  Slab slab(session, manifest);
  libtorch::GradientHooks hooks(captured.weights, slab);
  std::vector<double> alone, ours, at_end;
  for (int round = 0; round < rounds; ++round) {
    alone.push_back(backward_ms(plain.loss(), [&](const at::Tensor& loss) { loss.backward(); }));
    for (const auto& weight : plain.weights) weight.mutable_grad().reset();
    slab.gradients.begin(static_cast<std::uint64_t>(round) + 1);
    hooks.begin();
    ours.push_back(backward_ms(captured.loss(), [&](const at::Tensor& loss) {
      loss.backward();
      hooks.finish();
    }));
    at_end.push_back(backward_ms(plain.loss(), [&](const at::Tensor& loss) {
      loss.backward();
      for (std::size_t i = 0; i < plain.weights.size(); ++i) {
        auto& gradient = plain.weights[i].mutable_grad();
        std::memcpy(session.slab(0) + manifest.tensors[i].slab, gradient.const_data_ptr(), gradient.nbytes());
        gradient.reset();
      }
    }));
  }
  const std::pair<const char*, const std::vector<double>*> measured[] = {
      {"ours", &ours}, {"plain", &alone}, {"at_end", &at_end}};
  for (const auto& [name, times] : measured)
    bench::emit(name, "backward", "time", bench::median(*times), "ms", {{"bytes", double(bytes)}});
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  at::set_num_threads(1);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  return bench::exit_code_of([&] {
    for (const auto bytes : sizes) measure(bytes, quick ? 5 : 25);
  });
}
