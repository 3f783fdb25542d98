// Compares N runners with one process on random autograd graphs. The parameters have few sizes, so that one
// node often makes several gradients of one size.
#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_cell.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <rapidcheck.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <cstring>
#include <sstream>

#include "libtorch/model/layers.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t side = 264;  // Squares have 272 KiB. Tall tensors have the height of four: 1.1 MiB.
constexpr std::size_t squares = 4, talls = 2;
constexpr std::size_t most_rows = 8;
constexpr double largest_value = 30;  // Larger values are scaled, so that no graph overflows.

/// A user's own autograd node, which returns one tensor as both gradients.
struct Twice : torch::autograd::Function<Twice> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a, const at::Tensor& b) {
    return a + b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], gradients[0]};
  }
};

const double root = std::sqrt(double(side));
using Tensor = at::Tensor;
using Operation = Tensor (*)(const Tensor& a, const Tensor& b, const Tensor& tall, const Tensor& other);

Tensor as_square(const Tensor& tall) { return tall.view({4, side, side}).sum(0); }

/// Each operation makes a square of two squares and two tall tensors.
constexpr auto operations = std::to_array<Operation>({
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return a.matmul(b) / root; },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::linear(a, b) / root; },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return a.mm(b.t()) / root; },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::addmm(a, a, b, 1, 1 / root); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) {
      return at::bmm(at::stack({a, b}), at::stack({b, a})).mean(0) / root;
    },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return a + b; },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return a - b; },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return a * b; },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::lerp(a, b, 0.3); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::maximum(a, b); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::addcmul(a, a, b, 0.5); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::where(a > b, a, b * 0.5); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) {
      return at::stack({a, b, a}).sum(0);
    },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return a.clone().mul_(0.5).add_(b); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return at::layer_norm(a, {side}, b[0], b[1]); },
    [](const Tensor& a, const Tensor& b, auto&, auto&) {
      return at::embedding(a, at::arange(side, at::kLong).mul(7).remainder(side)) + b;
    },
    [](const Tensor& a, const Tensor& b, auto&, auto&) {
      const auto halves = at::cat({a, b}, -1).split(side / 2, -1);
      return at::cat({halves[1], halves[2]}, -1) + halves[0].repeat({1, 2});
    },
    [](const Tensor& a, const Tensor& b, auto&, auto&) { return Twice::apply(a, b); },
    [](const Tensor& a, const Tensor& b, const Tensor& tall, const Tensor& other) {
      const auto bias = std::array{tall.select(1, 0), other.select(1, 0)};
      const auto [hidden, state] = at::lstm_cell(a.slice(0, 0, 4), {b.slice(0, 0, 4), a.slice(0, 4, 8)}, tall,
                                                 other, bias[0], bias[1]);
      return at::cat({hidden, state, a.slice(0, 8)});
    },
    [](const Tensor& a, auto&, const Tensor& tall, const Tensor& other) {
      return as_square(tall + other) + a;
    },
    [](const Tensor& a, auto&, const Tensor& tall, const Tensor& other) {
      return as_square(tall * other) + a;
    },
    [](const Tensor& a, auto&, const Tensor& tall, const Tensor& other) {
      return as_square(at::cat({tall.slice(0, side), other.slice(0, 0, side)})) + a;
    },
    [](const Tensor& a, auto&, const Tensor& tall, const Tensor& other) {
      return as_square(Twice::apply(tall, other)) + a;
    },
});

/// An operation and the numbers of its operands. An operation of -1 ends the program.
struct Row {
  std::int64_t operation = -1, first = 0, second = 0;
};
using Program = std::array<Row, most_rows>;
using Programs = std::vector<Program>;

/// Runs the program that an element holds. The loss is the weighted mean of its last two results.
class Interpreter final : public model::ParameterModel {
 public:
  Interpreter() {
    for (std::size_t i = 0; i < squares; ++i)
      squares_.push_back(parameter("square" + std::to_string(i), at::randn({side, side})));
    for (std::size_t i = 0; i < talls; ++i)
      talls_.push_back(parameter("tall" + std::to_string(i), at::randn({4 * side, side}) / 16));
  }

  Outputs forward(const Batch& batch) override {
    Program program;
    std::memcpy(program.data(), batch["program"].const_data_ptr(), sizeof(program));
    auto values = squares_;
    for (const auto& row : program) {
      if (row.operation < 0) break;
      const auto first = static_cast<std::size_t>(row.first), second = static_cast<std::size_t>(row.second);
      const auto made = operations.at(static_cast<std::size_t>(row.operation))(
          values[first % values.size()], values[second % values.size()], talls_[first % talls],
          talls_[second / 2 % talls]);
      const auto largest = made.detach().abs().max().item().toDouble();
      values.push_back(largest <= largest_value ? made : made / largest);
    }
    const auto weights = at::arange(side * side, at::kFloat).view({side, side}).cos();
    const auto last = values.end();
    return {(last[-1] * weights).mean() + (last[-2] * weights).mean(), {}};
  }

 private:
  std::vector<at::Tensor> squares_, talls_;
};

/// Reads its elements from the option `programs`, numbers in text.
class ProgramSource final : public BatchSource {
 public:
  explicit ProgramSource(const std::string& text) : text_(text) {}
  std::span<const FieldSpec> fields() const override { return fields_; }
  bool next(ElementWriter& element) override {
    Program program;
    for (auto& row : program)
      if (!(text_ >> row.operation >> row.first >> row.second)) return false;
    std::memcpy(element.bytes(0).data(), program.data(), sizeof(program));
    return true;
  }

 private:
  std::istringstream text_;
  std::vector<FieldSpec> fields_{{"program", at::kLong, {most_rows, 3}}};
};

std::string text_of(const Programs& programs) {
  std::ostringstream text;
  for (const auto& program : programs)
    for (const auto& row : program) text << row.operation << ' ' << row.first << ' ' << row.second << '\n';
  return text.str();
}

const RegisteredModel interpreter("interpreter",
                                  [](const Config&) { return std::make_unique<Interpreter>(); });
const RegisteredData programs_data("programs", [](const Config& config) {
  return std::make_unique<ProgramSource>(config.data.options.at("programs"));
});

Config config_of(int nprocs, int accumulation, const Programs& programs) {
  auto config = small_config("interpreter");
  config.nprocs = nprocs;
  config.grad_accumulation_steps = accumulation;
  config.batch_size_per_device = 1;
  config.data.kind = "programs";
  config.data.options["programs"] = text_of(programs);
  return config;
}

/// Trains all programs in steps that accumulate. Returns the gradients, and those of one process.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> gradients_of(const Config& config,
                                                                         std::size_t steps) {
  auto manager = Manager::start(config);
  Reference reference(config);
  const auto parameters = copies(manager.parameters());
  std::vector<at::Tensor> expected;
  for (std::size_t step = 0; step < steps; ++step) {
    expect_ok(manager);
    const auto gradients = reference.step(parameters).gradients;
    expected.resize(gradients.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (step == 0) expected[i] = at::zeros_like(gradients[i]);  // As the master: a gradient of -0 makes +0.
      expected[i].add_(gradients[i]);
    }
  }
  return {copies(manager.gradients()), expected};
}

Program any_program() {
  Program program;
  const auto rows = *rc::gen::inRange<std::size_t>(1, most_rows + 1);
  const auto operand = rc::gen::inRange<std::int64_t>(0, most_rows + squares);
  for (std::size_t i = 0; i < rows; ++i)
    program[i] = {*rc::gen::inRange<std::int64_t>(0, std::ssize(operations)), *operand, *operand};
  return program;
}

TEST(RandomGraphs, HaveTheGradientsOfOneProcess) {
  EXPECT_TRUE(rc::check("gradients are those of one process", [] {
    const auto nprocs = *rc::gen::inRange(1, 4), accumulation = *rc::gen::inRange(1, 3);
    const auto steps = *rc::gen::inRange<std::size_t>(1, 4);
    Programs programs;
    for (std::size_t i = 0; i < static_cast<std::size_t>(nprocs * accumulation) * steps; ++i)
      programs.push_back(any_program());
    RC_LOG() << nprocs << " runners, " << accumulation << " micro-batches\n" << text_of(programs);
    const auto [actual, expected] = gradients_of(config_of(nprocs, accumulation, programs), steps);
    if (nprocs < 3) RC_ASSERT(same_bits(actual, expected));
    RC_ASSERT(distance(actual, expected) <= 1e-5);
  }));
}

// Without this, random graphs would prove little.
TEST(RandomGraphs, HaveFiniteGradientsOfThreeParametersByEachOperation) {
  for (std::size_t operation = 0; operation < operations.size(); ++operation) {
    Program program;
    program[0] = {static_cast<std::int64_t>(operation), 0, 2};
    const auto [actual, expected] = gradients_of(config_of(1, 1, {program}), 1);
    EXPECT_TRUE(same_bits(actual, expected)) << operation;
    std::size_t some = 0;
    for (const auto& gradient : actual) {
      EXPECT_TRUE(gradient.isfinite().all().item().toBool()) << operation;
      some += gradient.any().item().toBool();
    }
    EXPECT_GE(some, 3u) << operation;
  }
}

}  // namespace
}  // namespace accelmgr::test
