// The replica on a GPU computes what the replica in CPU memory computes, bit for bit, whatever the order in
// which the device copies.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>

#include "accelmgr/errors.hpp"
#include "cuda_rig.hpp"
#include "libtorch/tensor/torch_versions.hpp"
#include "message_of.hpp"
#include "refusal.hpp"

namespace accelmgr::test {
namespace {

using Result = ReplicaBench::Result;

/// The results of attempts that continue each other. The host writes parameters between them.
template <class Rig>
std::vector<Result> train(Rig& rig, const std::string& kind, int micro_batches, int attempts = 3) {
  std::vector<Result> results;
  rig->load();  // The generator, which all replicas of this process share.
  for (int i = 0; i < attempts; ++i) {
    results.push_back(
        rig->attempt(bench_batches(kind, std::uint64_t(i * micro_batches), micro_batches), i % 2 == 0));
    rig->write_parameters(0.9);
  }
  return results;
}

/// Names what differs; equal results are equal bits.
void expect_same(const std::vector<Result>& actual, const std::vector<Result>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].loss, expected[i].loss) << "attempt " << i;
    EXPECT_EQ(actual[i].scalars, expected[i].scalars) << "attempt " << i;
    EXPECT_EQ(actual[i].gradients.size(), expected[i].gradients.size()) << "attempt " << i;
    EXPECT_TRUE(actual[i].gradients == expected[i].gradients) << "attempt " << i;
    EXPECT_TRUE(actual[i].state == expected[i].state) << "attempt " << i;
  }
}

class CudaReplicaOf : public testing::TestWithParam<const char*> {};

// With bfloat16 slabs one micro-batch: of several, a device rounds the sum, and a replica in CPU memory
// rounds after each.
TEST_P(CudaReplicaOf, GivesTheBitsOfTheReplicaInHostMemoryWithEveryOption) {
  const std::string kind = GetParam();
  const std::pair<CudaRig::Options, int> variants[] = {{{.execution = FakeCuda::Execution::threads}, 3},
                                                       {{.has_slab = false}, 3},
                                                       {{.precision = {.bf16_slabs = true}}, 1},
                                                       {{.autocast = Autocast::bf16}, 2}};
  for (auto [options, micro_batches] : variants) {
    options.kind = kind;
    CpuRig cpu(options);
    CudaRig cuda(options);
    expect_same(train(cuda, kind, micro_batches, 6), train(cpu, kind, micro_batches, 6));
    EXPECT_EQ(cuda->sink.arrivals > 0, options.has_slab);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaReplicaOf, testing::Values("mlp", "convnet", "gpt", "odd", "odd64"),
                         [](const auto& info) { return std::string(info.param); });

// Attempts that are left: after a micro-batch, after the last one, and while collect() waits.
TEST(CudaReplica, AnAttemptThatWasLeftLeavesNothing) {
  CpuRig cpu({.kind = "odd"});
  cpu->load();
  const auto batches = bench_batches("odd", 0, 3);
  const auto expected = cpu->attempt(batches);
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    CudaRig cuda({.kind = "odd", .seed = seed});
    for (const int begun : {1, 3}) {
      cuda->begin(bench_batches("odd", 50, begun));
      cuda->load();
      EXPECT_TRUE(cuda.fake.has_settled()) << "memory of the attempt is free now";
    }
    cuda->begin(bench_batches("odd", 60, 2));
    int asked = 0;
    cuda->sink.asked = [&] { return ++asked < 2; };
    cuda.fake.hang_after(0);
    EXPECT_EQ(cuda->replica->collect().loss, 0);
    EXPECT_TRUE(cuda->sink.gradients.empty());
    cuda->sink.asked = nullptr;
    cuda.fake.go_on();
    cuda->load();
    expect_same({cuda->attempt(batches)}, {expected});
  }
}

/// An attempt of the committed state; before it, perhaps some that were left.
template <class Rig>
Result attempt_after_others(Rig& rig, const std::string& kind, std::uint64_t number) {
  std::mt19937_64 random(number);
  for (auto left = random() % 3; left > 0; --left) {
    rig->load();
    rig->begin(bench_batches(kind, random() % 100, 1 + int(random() % 3)), random() % 2 == 0);
  }
  if (random() % 2 == 0) rig->write_parameters(0.8);
  rig->load();
  return rig->attempt(bench_batches(kind, random() % 100, 1 + int(random() % 4)), random() % 2 == 0);
}

TEST(CudaReplica, GivesTheBitsOfTheReplicaInHostMemoryInAnyHistory) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const std::string kind = std::array{"mlp", "convnet", "gpt", "odd", "odd64"}[seed % 5];
    const CudaRig::Options options{.kind = kind, .seed = seed, .has_slab = seed % 3 != 0};
    SCOPED_TRACE(kind + ", seed " + std::to_string(seed));
    CpuRig cpu(options);
    CudaRig cuda(options);
    for (std::uint64_t step = 0; step < 4; ++step) {
      const auto number = seed * 100 + step;
      expect_same({attempt_after_others(cuda, kind, number)}, {attempt_after_others(cpu, kind, number)});
    }
    EXPECT_EQ(cuda->sink.arrivals > 0, options.has_slab);
    EXPECT_EQ(cuda.fake.unregistered_copies(), 0);
  }
}

TEST(CudaReplica, ReportsScalarsThatAreTensors) {
  CudaRig cuda({.kind = "odd"});
  const auto scalars = cuda->attempt(bench_batches("odd", 0, 3)).scalars;
  ASSERT_EQ(scalars.size(), 3u);
  EXPECT_EQ(scalars[0].first, "rows");
  EXPECT_NEAR(scalars[0].second, (4 + 3 + 4) / 3.0, 1e-12);
  EXPECT_EQ(scalars[1].first, "norm");
  EXPECT_EQ(scalars[2].first, "calls");
  EXPECT_NEAR(scalars[2].second, (1 + 2 + 3) / 3.0, 1e-12) << "each as it was in its micro-batch";
}

TEST(CudaReplica, TellsWhichGradientsAreNotFiniteAndTheirLoss) {
  for (const char* kind : {"odd", "odd64", "convnet"}) {
    CpuRig cpu({.kind = kind});
    cpu->write_parameters(std::numeric_limits<double>::infinity());
    EXPECT_FALSE(std::isfinite(cpu->attempt(bench_batches(kind, 2, 2)).loss)) << kind;
    CudaRig cuda({.kind = kind});
    cuda->attempt(bench_batches(kind, 0, 2));
    EXPECT_TRUE(cuda->sink.not_finite.empty());
    cuda->write_parameters(std::numeric_limits<double>::infinity());
    const auto result = cuda->attempt(bench_batches(kind, 2, 2));
    EXPECT_FALSE(std::isfinite(result.loss)) << kind;
    EXPECT_FALSE(result.gradients.empty());
    for (const auto& [index, values] : result.gradients)
      EXPECT_EQ(cuda->sink.not_finite.contains(index), !values.empty()) << kind << ", parameter " << index;
  }
}

TEST(CudaReplica, GivesBackWhatItTookFromTheDevice) {
  CudaRig cuda({.kind = "convnet"});
  cuda->attempt(bench_batches("convnet", 0, 2));
  cuda->begin(bench_batches("convnet", 5, 2));
  cuda->replica.reset();
  EXPECT_EQ(cuda.fake.held(), FakeCuda::Held{});
  EXPECT_EQ(cuda.fake.early_unregistrations(), 0);
}

/// Does in forward() what the test wants.
class Disturbed final : public Model {
 public:
  explicit Disturbed(std::function<void(Disturbed&)> in_forward) : in_forward_(std::move(in_forward)) {}
  std::vector<NamedTensor> parameters() override { return {{"weight", weight}}; }
  std::vector<NamedTensor> buffers() override { return {{"count", count}}; }
  void train(bool) override {}
  Outputs forward(const Batch& batch) override {
    in_forward_(*this);
    count.add_(1);
    const auto products = batch["input"].mul(weight).mul(count[0]);
    return {sums ? products.sum() : products, {}};
  }
  at::Tensor weight = at::ones({6}).requires_grad_(), count = at::zeros({2});
  bool sums = true;

 private:
  std::function<void(Disturbed&)> in_forward_;
};

/// A replica of a model that does this in forward().
CudaRig::Options disturbed(std::function<void(Disturbed&)> in_forward) {
  return {.make = [=](const Config&) { return std::make_unique<Disturbed>(in_forward); }};
}

TEST(CudaReplica, ABatchIsNotCopiedWhereTheAttemptIsOver) {
  CudaRig cuda(disturbed([](Disturbed&) {}));
  cuda.fake.hang_after(0);
  cuda->sink.asked = [] { return false; };
  cuda->replica->begin_attempt();
  const auto batch = bench_batch("mlp", 0);
  for (int i = 0; i < 3; ++i) cuda->replica->run(batch.fields, 1);
  EXPECT_EQ(cuda->sink.backwards, 2) << "two are staged, and the third waits for the first";
  cuda.fake.go_on();
}

/// The text of the exception with which an attempt ends.
/// As torch does, which has AcceleratorError since 2.8.
template <class Error>
void throw_accelerator_error(int code, const char* text) {
  if constexpr (requires { sizeof(Error); }) throw Error({__func__, __FILE__, __LINE__}, code, text);
  TORCH_CHECK(false, text);
}

template <class Exception, class Rig = CudaRig>
std::string failure_of(std::function<void(Disturbed&)> in_forward) {
  Rig rig(disturbed(std::move(in_forward)));
  return message_of<Exception>([&] { rig->attempt(bench_batches("mlp", 0, 1)); });
}

TEST(CudaReplica, ErrorsOfTheModelAreErrorsOfTheModelAsInHostMemory) {
  const auto expect_error = [](const std::function<void(Disturbed&)>& in_forward, const char* part) {
    for (const auto& text :
         {failure_of<ModelError, CudaRig>(in_forward), failure_of<ModelError, CpuRig>(in_forward)})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_error([](Disturbed&) { at::ones({2}).add(at::ones({3})); }, "must match the size");
  expect_error([](Disturbed& model) { model.weight.set_data(at::ones({6})); }, "'weight' was replaced");
  expect_error([](Disturbed& model) { model.weight = model.weight.detach().mul(2).requires_grad_(); },
               "parameter 'weight' was replaced by the model");
  expect_error([](Disturbed& model) { model.sums = false; }, "[4, 6]");
  const auto text = failure_of<ModelError>([](Disturbed&) {
    throw_accelerator_error<c10::AcceleratorError>(710, "CUDA error: device-side assert triggered");
  });
  EXPECT_NE(text.find("device-side assert"), std::string::npos) << "a kernel has refused an index: " << text;
}

TEST(CudaReplica, ErrorsOfTheDeviceAreNone) {
  auto text = failure_of<device::DeviceError>([](Disturbed&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 20.00 GiB.");
  });
  EXPECT_EQ(text, "CUDA out of memory. Tried to allocate 20.00 GiB.");
  text = failure_of<device::DeviceError>([](Disturbed&) {
    throw_accelerator_error<c10::AcceleratorError>(700, "CUDA error: an illegal memory access");
  });
  EXPECT_EQ(text, "CUDA error: an illegal memory access");
  text = failure_of<device::DeviceError>([](Disturbed&) {
    TORCH_CHECK(false, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
  });
  expect_contains(text, {"CUBLAS_STATUS_ALLOC_FAILED"});
}

TEST(CudaReplica, ABufferThatTheModelReplacedIsStillSavedAndLoaded) {
  CudaRig cuda(disturbed([](Disturbed& model) {
    model.count.set_data(at::ones({2, 1}).mul(3).expand({2, 2}).t()[0]);
  }));
  cuda->attempt(bench_batches("mlp", 0, 1));
  float saved[2];
  std::memcpy(saved, cuda->state.data(), sizeof saved);
  EXPECT_EQ(saved[0], 4) << "3, and one forward()";
  EXPECT_EQ(saved[1], 4);
  saved[1] = 5;
  std::memcpy(cuda->state.data(), saved, sizeof saved);
  cuda->load();
  cuda->save();
  std::memcpy(saved, cuda->state.data(), sizeof saved);
  EXPECT_EQ(saved[1], 5);
}

/// A model of one parameter and one buffer.
CudaRig::Options small() {
  return disturbed([](Disturbed&) {});
}

// Each call of the runtime fails once, wherever the attempt is: the error names it and nothing is lost.
TEST(CudaReplica, WhateverTheRuntimeReportsIsAnErrorOfTheDevice) {
  for (const char* function : {"cudaStreamCreateWithFlags", "cudaStreamWaitEvent", "cudaEventCreateWithFlags",
                               "cudaEventRecord", "cudaEventQuery", "cudaMemcpyAsync", "cudaHostAlloc"}) {
    for (int nth = 1;; ++nth) {
      CudaRig cuda(small());
      const int before = cuda.fake.calls(function);
      cuda.fake.fail(function, nth, device::code::out_of_memory);
      try {
        cuda->attempt(bench_batches("mlp", 0, 2));
        EXPECT_LT(cuda.fake.calls(function) - before, nth) << function;
        break;
      } catch (const device::DeviceError& error) {
        EXPECT_EQ(error.function(), function);
      }
      if (nth > 60) break;  // Polls.
    }
  }
}

TEST(CudaReplica, ADeviceThatIsLostIsAnErrorOfTheDevice) {
  for (int operations = 0;; ++operations) {
    CudaRig cuda(small());
    cuda.fake.break_after(operations, device::code::illegal_address);
    try {
      cuda->attempt(bench_batches("mlp", 0, 2));
      EXPECT_GT(operations, 15);
      break;
    } catch (const device::DeviceError& error) {
      EXPECT_EQ(error.code(), device::code::illegal_address);
    }
  }
}

TEST(CudaReplica, ADeviceThatHangsIsGivenUpAfterTheStepTimeout) {
  for (const int operations : {0, 4, 8}) {
    auto options = small();
    options.step_timeout = 0.5;
    CudaRig cuda(options);
    cuda.fake.hang_after(operations);
    int asked = 0;
    cuda->sink.asked = [&] { return ++asked > 0; };
    expect_contains(message_of<device::DeviceError>([&] { cuda->attempt(bench_batches("mlp", 0, 2)); }),
                    {"the device hangs: it has not done its work within 0.5 s"});
    EXPECT_GT(asked, 0) << "it gave signs of life";
    cuda.bench.reset();
    EXPECT_EQ(cuda.fake.endless_waits(), 0);
  }
}

// Waits.

constexpr std::uint64_t orders = 40;

/// The results of two attempts, between which another is left. Nothing where the model itself notices that a
/// wait is missing.
std::vector<Result> two_attempts(CudaRig& cuda) {
  std::vector<Result> results;
  try {
    results.push_back(cuda->attempt(bench_batches("mlp", 0, 3)));
    cuda->write_parameters(0.9);
    cuda->begin(bench_batches("mlp", 70, 3));
    cuda->load();
    results.push_back(cuda->attempt(bench_batches("mlp", 10, 3)));
  } catch (const ModelError&) {
    results.clear();
  }
  return results;
}

/// Whether some order of execution gives wrong results where this wait is missing.
bool is_needed(const FakeCuda::Wait& wait, const std::vector<Result>& expected) {
  for (std::uint64_t seed = 0; seed < orders; ++seed) {
    auto options = small();
    options.seed = seed;
    CudaRig cuda(options);
    cuda.fake.leave_out(wait);
    if (two_attempts(cuda) != expected) return true;
  }
  return false;
}

// Torch's CPU computes before it returns. So tests/engine/device shows that the copies of gradients wait for
// kernels, and that the host waits before it uses memory of a batch again. Waits after which memory is freed
// change no result.
TEST(CudaReplica, NeedsTheWaitsForWhatItReads) {
  std::vector<Result> expected;
  std::set<FakeCuda::Wait> waits;
  {
    CudaRig cuda(small());
    expected = two_attempts(cuda);
    waits = cuda.fake.waits();
  }
  int needed_by_host = 0, needed_by_kernels = 0;
  for (const auto& wait : waits) {
    if (wait.waiter == FakeCuda::host) needed_by_host += is_needed(wait, expected);
    if (wait.waiter == compute_stream) needed_by_kernels += is_needed(wait, expected);
  }
  // For the buffers, for the bucket of gradients, which is made anew after the first attempt, and for the
  // numbers.
  EXPECT_EQ(needed_by_host, 4);
  // For the parameters, and for batches in either memory.
  EXPECT_EQ(needed_by_kernels, 3);
  EXPECT_EQ(std::ranges::count(waits, compute_stream, &FakeCuda::Wait::waiter), 3) << "all are needed";
}

}  // namespace
}  // namespace accelmgr::test
