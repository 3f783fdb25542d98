// Measures all_reduce of ranks on several nodes. Every rank runs this program under `accelmgr spawn`. Rank 0
// prints the times of the slowest rank.
#include <ATen/ops/full.h>

#include <algorithm>
#include <vector>

#include "accelmgr/distributed.hpp"
#include "accelmgr/init.hpp"
#include "base/clock.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

// The same as in peers/gloo_nodes.py.
constexpr std::int64_t sizes[] = {4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
constexpr std::int64_t budget_bytes = 256 << 20;

double median_us(std::int64_t bytes, bool quick) {
  const auto values = at::full({bytes / 4}, 1.0F);
  const auto full = std::clamp<std::int64_t>(budget_bytes / bytes, 5, 200);
  const auto count = quick ? std::max<std::int64_t>(3, full / 8) : full;
  std::vector<double> times;
  for (std::int64_t repetition = 0; repetition < count + 2; ++repetition) {
    distributed::barrier();
    const auto begin = base::now_ns();
    distributed::all_reduce_(values);
    if (repetition >= 2) times.push_back(static_cast<double>(base::now_ns() - begin) / 1e3);
  }
  return distributed::all_reduce(bench::median(std::move(times)), "MAX");
}

void run(bool quick) {
  for (const auto bytes : sizes) {
    const double us = median_us(bytes, quick);
    if (distributed::get_rank() == 0)
      bench::emit("ours", "all_reduce", "time", us, "us", {{"bytes", static_cast<double>(bytes)}});
  }
  distributed::finalize();
}

}  // namespace

int main(int argc, char** argv) {
  accelmgr::init(argc, argv);
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { run(quick); });
}
