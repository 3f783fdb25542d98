// Measures the time from the call of spawn() until all ranks are past one barrier.
//
// `bench_launch --as-rank FOLDER` is a rank for launchers that execute programs. It writes the time into
// FOLDER.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "accelmgr/distributed.hpp"
#include "accelmgr/init.hpp"
#include "accelmgr/launch.hpp"
#include "base/clock.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr const char* function_name = "past_a_barrier";

/// Returns the time at which this rank was past the barrier.
launch::Value past_a_barrier(int /*rank*/, const launch::Value& /*args*/) {
  distributed::barrier();
  return base::now_ns();
}

struct Way {
  const char* name;
  StartMethod start_method;
  int repetitions, quick_repetitions;
};

constexpr Way ways[] = {
    {"ours_fork", StartMethod::fork, 15, 5},
    {"ours_forkserver", StartMethod::forkserver, 15, 5},  // The first call, not counted, starts the server.
    {"ours_spawn", StartMethod::spawn, 3, 1}};

double start_up_ms(int nprocs, StartMethod start_method) {
  launch::Options options;
  options.nprocs = nprocs;
  options.start_method = start_method;
  options.backend = "shm";
  const auto begin = base::now_ns();
  const auto context = launch::spawn(function_name, launch::Value::array(), options);
  std::int64_t last = begin;
  for (const auto& result : context.results()) last = std::max(last, result.get<std::int64_t>());
  return static_cast<double>(last - begin) / 1e6;
}

void run(bool quick) {
  for (const auto& way : ways) {
    start_up_ms(2, way.start_method);
    for (const int nprocs : {2, 8}) {
      std::vector<double> times;
      for (int i = 0; i < (quick ? way.quick_repetitions : way.repetitions); ++i)
        times.push_back(start_up_ms(nprocs, way.start_method));
      bench::emit(way.name, std::to_string(nprocs), "start_up", bench::median(times), "ms");
    }
  }
}

void as_rank(const std::filesystem::path& folder) {
  distributed::barrier();
  const auto now = base::now_ns();
  std::ofstream(folder / std::to_string(distributed::get_rank())) << now;
}

}  // namespace

int main(int argc, char** argv) {
  launch::register_function(function_name, past_a_barrier);
  accelmgr::init(argc, argv);
  if (argc == 3 && std::strcmp(argv[1], "--as-rank") == 0)
    return bench::exit_code_of([&] { as_rank(argv[2]); });
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { run(quick); });
}
