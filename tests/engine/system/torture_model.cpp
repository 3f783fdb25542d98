// The model and the source that are trained under torture. They have every kind of state in which an
// uncounted attempt must leave no trace.
#include <algorithm>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "engine/data/random.hpp"
#include "engine/support/mixed_dtypes.hpp"
#include "engine/support/perceptron.hpp"
#include "engine/support/plain_replica.hpp"
#include "living_children.hpp"
#include "support.hpp"
#include "torture_course.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t inputs = 32;

/// Another seed, other dtypes.
std::vector<DType> dtypes_of(std::uint64_t seed) {
  std::vector dtypes{DType::bfloat16, DType::complex64, DType::float16, DType::float32, DType::float64};
  std::rotate(dtypes.begin(), dtypes.begin() + static_cast<std::ptrdiff_t>(seed % dtypes.size()),
              dtypes.end());
  return dtypes;
}

/// The gradients have 8 to 22 chunks, so that every rank's slice has some. Every fourth batch gives nine
/// gradients, the others eight.
const RegisteredReplica model(tortured, [](const Config& config, replica::Role) {
  return std::make_unique<PlainReplica>(
      with_dtypes(make_perceptron({.inputs = inputs, .hidden = 96, .seed = config.seed_base}),
                  dtypes_of(config.seed_base)));
});

/// An endless source. Each element depends on all elements before it, so a source that goes on at the wrong
/// place gives wrong elements.
class TorturedSource final : public BatchSource {
 public:
  explicit TorturedSource(const Config& config)
      : has_children_(config.data.options.contains(has_children)), position_{.chain = config.data.seed} {}

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    constexpr int elements_per_child = 50 * elements_per_step;
    if (has_children_ && position_.index % elements_per_child == 0) children_.add();
    position_.chain = base::mix(position_.chain + static_cast<std::uint64_t>(position_.index));
    data::Random random(position_.chain);
    float input[inputs];
    for (auto& x : input) x = random.normal();
    std::memcpy(element.bytes(0).data(), input, sizeof input);
    std::memcpy(element.bytes(1).data(), &position_.index, sizeof position_.index);
    ++position_.index;
    return true;
  }

  std::optional<std::string> state() const override {
    return std::string(reinterpret_cast<const char*>(&position_), sizeof position_);
  }
  void restore(const std::string& state) override {
    if (state.size() != sizeof position_) throw DataError("a state of the tortured source has 16 bytes");
    std::memcpy(&position_, state.data(), sizeof position_);
  }

 private:
  struct Position {
    std::int64_t index = 0;
    std::uint64_t chain;
  };
  std::vector<FieldSpec> fields_{{"input", DType::float32, {inputs}}, {"index", DType::int64, {}}};
  bool has_children_;
  LivingChildren children_;
  Position position_;
};

const RegisteredData source(tortured,
                            [](const Config& config) { return std::make_unique<TorturedSource>(config); });

}  // namespace
}  // namespace accelmgr::test
