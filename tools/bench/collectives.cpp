// Measures collectives of two ranks between private tensors. The ranks are not pinned to cores; neither are
// those of the peer.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr int ranks = 2;
constexpr std::size_t largest_bytes = std::size_t{256} << 20;
constexpr int most_cases = 32;

// The same as in peers/gloo_collectives.py.
std::vector<std::size_t> sizes(bool quick) {
  std::vector<std::size_t> all{4,       64,       1024,     16384,        std::size_t{256} << 10,
                               4 << 20, 16 << 20, 64 << 20, largest_bytes};
  if (!quick) return all;
  std::vector<std::size_t> some;
  for (std::size_t i = 0; i < all.size(); i += 2) some.push_back(all[i]);
  return some;
}

int repetitions(std::size_t bytes, bool quick) {
  const auto fitting = static_cast<int>(largest_bytes / std::max<std::size_t>(bytes, 1));
  const int full = std::clamp(fitting, 7, 400);
  return quick ? std::max(3, full / 8) : full;
}

/// Median time of a call. The ranks begin each call together; the first two calls are not counted.
double median_us(Communicator& communicator, const std::function<void()>& call, int count) {
  std::vector<double> times;
  for (int repetition = 0; repetition < count + 2; ++repetition) {
    communicator.barrier();
    const auto begin = base::now_ns();
    call();
    if (repetition >= 2) times.push_back(static_cast<double>(base::now_ns() - begin) / 1e3);
  }
  return bench::median(std::move(times));
}

struct Case {
  const char* call;
  std::size_t bytes;
};

std::vector<Case> cases(bool quick) {
  std::vector<Case> all{{"barrier", 0}};
  for (const auto bytes : sizes(quick)) all.push_back({"all_reduce", bytes});
  for (const std::size_t bytes : {100, 100'000}) all.push_back({"all_gather_object", bytes});
  return all;
}

double measure(Communicator& communicator, const Case& one, bool quick) {
  const int count = repetitions(one.bytes, quick);
  if (std::strcmp(one.call, "barrier") == 0)
    return median_us(
        communicator, [&] { communicator.barrier(); }, count);
  if (std::strcmp(one.call, "all_reduce") == 0) {
    std::vector<float> values(one.bytes / sizeof(float), 1.0F / ranks);
    const auto reduce = [&] {
      communicator.all_reduce(values.data(), values.data(), values.size(), DType::float32, ReduceOp::sum);
    };
    return median_us(communicator, reduce, count);
  }
  const std::string object(one.bytes, 'x');
  return median_us(
      communicator, [&] { communicator.all_gather_objects(object); }, count);
}

void run(bool quick) {
  const auto all = cases(quick);
  const auto world = collective::shm::create_world(ranks);
  auto* slower_us = bench::share<double>(most_cases * ranks);
  bench::run_together(ranks, [&](int rank) {
    const auto communicator = collective::shm::join_world(world.get(), rank);
    for (std::size_t i = 0; i < all.size(); ++i)
      slower_us[i * ranks + static_cast<std::size_t>(rank)] = measure(*communicator, all[i], quick);
  });
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double us = *std::max_element(slower_us + i * ranks, slower_us + (i + 1) * ranks);
    bench::emit("ours", all[i].call, "time", us, "us", {{"bytes", static_cast<double>(all[i].bytes)}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { run(quick); });
}
