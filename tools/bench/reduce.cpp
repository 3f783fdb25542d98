// Measures how fast two processes reduce gradients through shared memory, and compares that with copying in
// and out of private memory and with the memory bandwidth of the machine.
//
// Two processes share the slab of each and the master; each reduces half. If they may use two cores, each has
// its own. One JSON object per case goes to standard output:
//   name              ours | copy_in_out | stream_add | barrier
//   bytes_per_runner  bytes of float32 gradients (a bfloat16 slab has half of that)
//   mode, undo
//   dtype             fp32 | bf16: slabs, the master has float32 | all_bf16: master and slabs
//   us                median time of one reduction and the barrier after it
//   gb_per_s          counts the passes that the result needs: each slab once, the master once, or twice to
//                     accumulate
//
// copy_in_out: each process has a private gradient and wants the sum in private memory: copy into shared
// memory, reduce, copy (or add) out, with the block sizes and the vector copies of DeepSpeed's shm.cpp.
// stream_add: c = a + b, the better of regular and non-temporal stores. All cases of one size alternate
// within one run.
//
// usage: bench_reduce [--quick] [--max-bytes N]
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/clock.hpp"
#include "engine/session/kernels.hpp"

namespace {

using namespace accelmgr;
using session::ElementTypes;
using session::SumInto;

constexpr int processes = 2;
constexpr std::size_t kib = 1024, mib = 1024 * kib;

void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

/// A barrier of both processes. Spins at first, then yields, because the processes may share a core.
class Barrier {
 public:
  void wait() noexcept {
    const auto round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == processes) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < 20'000) {
        relax();
      } else {
        sched_yield();
      }
    }
  }

 private:
  alignas(64) std::atomic<std::uint32_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> round_{0};
};

void fail(const std::string& what) {
  std::perror(("reduce: " + what).c_str());
  std::exit(1);
}

/// Zeroed, populated memory that lives as long as the process.
void* map(std::size_t bytes, int sharing) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) fail("cannot map " + std::to_string(bytes / mib) + " MiB");
  return memory;
}

/// STREAM add with the widest vectors of the machine is the bandwidth to compare with.
#if defined(__x86_64__)
[[gnu::target("avx512f")]] void add_avx512(float* c, const float* a, const float* b, std::size_t count,
                                           bool non_temporal) {
  for (std::size_t i = 0; i < count; i += 16) {
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i));
    non_temporal ? _mm512_stream_ps(c + i, sum) : _mm512_storeu_ps(c + i, sum);
  }
  _mm_sfence();
}
[[gnu::target("avx2")]] void add_avx2(float* c, const float* a, const float* b, std::size_t count,
                                      bool non_temporal) {
  for (std::size_t i = 0; i < count; i += 8) {
    const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i));
    non_temporal ? _mm256_stream_ps(c + i, sum) : _mm256_storeu_ps(c + i, sum);
  }
  _mm_sfence();
}
#endif

void stream_add(float* c, const float* a, const float* b, std::size_t count, bool non_temporal) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return add_avx512(c, a, b, count, non_temporal);
  if (__builtin_cpu_supports("avx2")) return add_avx2(c, a, b, count, non_temporal);
#endif
  for (std::size_t i = 0; i < count; ++i) c[i] = a[i] + b[i];
}

struct Shared {
  Barrier barrier;
  struct {
    alignas(64) std::atomic<std::uint64_t> cursor;
    alignas(session::chunk_bytes) char undo_image[session::chunk_bytes];
  } rank[processes];
};

struct Case {
  std::string name, mode, dtype;
  bool undo;
  double passes;  ///< Bytes counted, per byte of a runner's gradient.
  std::function<void()> work;
  std::vector<double> us{};
};

/// The memory of one process and the cases that it measures.
class Bench {
 public:
  Bench(Shared* shared, std::size_t max_bytes)
      : shared_(shared),
        kernels_(session::best_kernels()),
        master_(static_cast<float*>(map(max_bytes, MAP_SHARED))) {
    for (auto& slab : slabs_) slab = static_cast<float*>(map(max_bytes, MAP_SHARED));
    // The halves of these numbers' bits, read as bfloat16, are ordinary numbers too.
    for (int r = 0; r < processes; ++r) std::fill_n(slabs_[r], max_bytes / sizeof(float), r + 1.0f);
  }

  /// Call it in each process after the fork.
  void start(int rank, std::size_t max_bytes) {
    rank_ = rank;
    gradient_ = static_cast<float*>(map(max_bytes, MAP_PRIVATE));
    private_sum_ = static_cast<float*>(map(max_bytes, MAP_PRIVATE));
    for (float* array : {master_, slabs_[0], slabs_[1]}) madvise(array, max_bytes, MADV_POPULATE_WRITE);
  }

  std::vector<Case> cases(std::size_t bytes) {
    const std::size_t count = bytes / sizeof(float);
    const std::size_t half = count / processes;
    const std::size_t first = half * static_cast<std::size_t>(rank_);
    std::vector<Case> list;
    using session::Element;
    for (const auto& [dtype, master, slab] : {std::tuple{"fp32", Element::f32, Element::f32},
                                              {"bf16", Element::f32, Element::bf16},
                                              {"all_bf16", Element::bf16, Element::bf16}}) {
      const ElementTypes types{.master = master, .slab = slab, .gradient = master};
      const double slab_passes = processes * session::bytes_of(slab) / 4.0;
      const double master_pass = session::bytes_of(master) / 4.0;
      const auto into =
          bytes >= session::non_temporal_from_bytes ? SumInto::overwrite_non_temporal : SumInto::overwrite;
      list.push_back({"ours", "overwrite", dtype, false, slab_passes + master_pass,
                      [=, this] { reduce(first, half, types, into); }});
      list.push_back({"ours", "accumulate", dtype, false, slab_passes + 2 * master_pass,
                      [=, this] { reduce(first, half, types, SumInto::accumulate); }});
      list.push_back({"ours", "accumulate", dtype, true, slab_passes + 2 * master_pass,
                      [=, this] { accumulate_with_undo(first, half, types); }});
    }
    list.push_back({"copy_in_out", "overwrite", "fp32", false, processes + 1.0,
                    [=, this] { copy_in_out(count, SumInto::overwrite); }});
    list.push_back({"copy_in_out", "accumulate", "fp32", false, processes + 2.0,
                    [=, this] { copy_in_out(count, SumInto::accumulate); }});
    for (bool non_temporal : {false, true}) {
      list.push_back({"stream_add", non_temporal ? "non_temporal" : "regular", "fp32", false, 3, [=, this] {
                        stream_add(master_ + first, slabs_[0] + first, slabs_[1] + first, half, non_temporal);
                      }});
    }
    list.push_back({"barrier", "", "", false, 0, [] {}});
    return list;
  }

  /// Runs the cases in turns. Each turn of a case gives one sample: the mean of `repeats` runs. If `warm`, a
  /// run before them fills the caches.
  void measure(std::vector<Case>& list, int turns, int repeats, bool warm) {
    for (int turn = 0; turn < turns; ++turn) {
      for (Case& c : list) {
        if (warm) c.work();
        shared_->barrier.wait();
        const auto begin = base::now_ns();
        for (int i = 0; i < repeats; ++i) {
          c.work();
          shared_->barrier.wait();
        }
        c.us.push_back(static_cast<double>(base::now_ns() - begin) * 1e-3 / repeats);
      }
    }
  }

  /// True if a reduction of `bytes` gives the right sum.
  bool check(std::size_t bytes) {
    const std::size_t count = bytes / sizeof(float);
    reduce(0, count, {}, SumInto::overwrite);
    return std::all_of(master_, master_ + count, [](float sum) { return sum == 3.0f; });
  }

 private:
  void reduce(std::size_t first, std::size_t count, ElementTypes types, SumInto into) const {
    const void* slabs[processes];
    for (int r = 0; r < processes; ++r) {
      slabs[r] = reinterpret_cast<const char*>(slabs_[r]) + first * session::bytes_of(types.slab);
    }
    kernels_.reduce(master_at(first, types), slabs, count, types, into);
  }

  void* master_at(std::size_t element, ElementTypes types) const {
    return reinterpret_cast<char*>(master_) + element * session::bytes_of(types.master);
  }

  void accumulate_with_undo(std::size_t first, std::size_t count, ElementTypes types) const {
    const std::size_t bytes = session::bytes_of(types.master), chunk = session::chunk_bytes / bytes;
    auto& own = shared_->rank[rank_];
    for (std::size_t at = 0; at < count; at += chunk) {
      const std::size_t here = std::min(chunk, count - at);
      kernels_.save(own.undo_image, master_at(first + at, types), here * bytes);
      own.cursor.store(at << 1 | 1, std::memory_order_release);
      std::atomic_thread_fence(std::memory_order_release);  // The master changes after the cursor.
      reduce(first + at, here, types, SumInto::accumulate);
      own.cursor.store((at + here) << 1, std::memory_order_release);
    }
  }

  void copy_in_out(std::size_t count, SumInto into) const {
    constexpr std::size_t block = 32 * mib / sizeof(float);
    constexpr std::size_t symmetric_below = mib / sizeof(float);
    for (std::size_t at = 0; at < count; at += block) {
      const std::size_t here = std::min(block, count - at), half = here / processes;
      kernels_.save(slabs_[rank_], gradient_ + at, here * sizeof(float));
      shared_->barrier.wait();
      if (count < symmetric_below) {
        const void* slabs[] = {slabs_[0], slabs_[1]};
        kernels_.reduce(private_sum_ + at, slabs, here, {}, into);
      } else {
        reduce(half * static_cast<std::size_t>(rank_), half, {}, SumInto::overwrite);
        shared_->barrier.wait();
        const void* sum = master_;
        kernels_.reduce(private_sum_ + at, {&sum, 1}, here, {}, into);
      }
    }
  }

  Shared* shared_;
  const session::Kernels& kernels_;
  float* master_;
  float* slabs_[processes];
  float* gradient_ = nullptr;
  float* private_sum_ = nullptr;
  int rank_ = 0;
};

void print(const Case& c, std::size_t bytes, double us) {
  std::printf(
      "{\"name\":\"%s\",\"bytes_per_runner\":%zu,\"mode\":\"%s\",\"undo\":%s,\"dtype\":\"%s\",\"us\":%.3f,"
      "\"gb_per_s\":%.2f}\n",
      c.name.c_str(), bytes, c.mode.c_str(), c.undo ? "true" : "false", c.dtype.c_str(), us,
      c.passes * static_cast<double>(bytes) / us * 1e-3);
}

void report(std::vector<Case>& list, std::size_t bytes) {
  const Case* best_add = nullptr;
  double best_add_us = 0;
  for (Case& c : list) {
    const auto middle = c.us.begin() + static_cast<std::ptrdiff_t>(c.us.size() / 2);
    std::nth_element(c.us.begin(), middle, c.us.end());
    if (c.name != "stream_add") {
      print(c, bytes, *middle);
    } else if (best_add == nullptr || *middle < best_add_us) {
      best_add = &c;
      best_add_us = *middle;
    }
  }
  print(*best_add, bytes, best_add_us);
  std::fflush(stdout);
}

/// Pins this process to the rank-th of its cores. Does nothing if there are too few.
void pin(int rank) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < processes) return;
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || seen++ != rank) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

struct Options {
  bool quick = false;
  std::size_t max_bytes = 256 * mib;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      options.quick = true;
      options.max_bytes = 16 * mib;
    } else if (argument == "--max-bytes" && i + 1 < argc) {
      options.max_bytes = std::strtoull(argv[++i], nullptr, 10) / (4 * kib) * (4 * kib);
    } else {
      options.max_bytes = 0;
    }
  }
  if (options.max_bytes == 0) {
    std::fprintf(stderr, "usage: %s [--quick] [--max-bytes N]   (N at least 4096)\n", argv[0]);
    std::exit(2);
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  auto* shared = new (map(sizeof(Shared), MAP_SHARED)) Shared;
  Bench bench(shared, options.max_bytes);
  if (!bench.check(std::min(mib, options.max_bytes))) fail("a reduction gave a wrong sum");

  // If the child dies, this process must end too: it would wait at a barrier for ever.
  std::signal(SIGCHLD, [](int) { _exit(1); });
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) fail("cannot fork");
  const int rank = child == 0 ? 1 : 0;
  if (rank == 1 && (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)) _exit(1);
  pin(rank);
  bench.start(rank, options.max_bytes);

  const std::size_t step = options.quick ? 16 : 4;
  for (std::size_t bytes = 4 * kib; bytes <= options.max_bytes; bytes *= step) {
    auto list = bench.cases(bytes);
    const bool cached = bytes <= 4 * mib;
    bench.measure(list, options.quick ? 7 : 21, cached ? 20 : 1, cached);
    if (rank == 0) report(list, bytes);
  }
  std::signal(SIGCHLD, SIG_DFL);
  shared->barrier.wait();
  if (rank == 1) _exit(0);
  int status = 0;
  return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}
