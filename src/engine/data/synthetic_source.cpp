#include "engine/data/synthetic_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "engine/data/random.hpp"
#include "engine/data/source_position.hpp"

namespace accelmgr::data {
namespace {

/// Independent streams of random numbers from one seed.
enum class Stream : std::uint64_t { task = 0, training = 1, held_out = 2 };

Random random_of(std::uint64_t seed, Stream stream, std::uint64_t index = 0) {
  return Random(seed, static_cast<std::uint64_t>(stream), index);
}

/// What a model is to learn. Immutable, so that a source and its held-out part can share it.
class Task {
 public:
  explicit Task(std::vector<FieldSpec> fields) : fields_(std::move(fields)) {}
  virtual ~Task() = default;
  std::span<const FieldSpec> fields() const { return fields_; }
  virtual void write(Random random, ElementWriter& element) const = 0;

 private:
  std::vector<FieldSpec> fields_;
};

class Classes final : public Task {
 public:
  Classes(std::vector<std::int64_t> input_shape, std::size_t classes, std::uint64_t seed)
      : Task({{"input", DType::float32, std::move(input_shape)}, {"target", DType::int64, {}}}),
        classes_(classes),
        size_(fields()[0].bytes() / sizeof(float)),
        means_(classes_ * size_) {
    Random random = random_of(seed, Stream::task);
    for (float& mean : means_) mean = random.normal();
  }

  void write(Random random, ElementWriter& element) const override {
    const std::uint64_t target = random.below(classes_);
    const float* mean = means_.data() + target * size_;
    auto* input = reinterpret_cast<float*>(element.bytes(0).data());
    for (std::size_t k = 0; k < size_; ++k) input[k] = mean[k] + random.normal();
    std::memcpy(element.bytes(1).data(), &target, sizeof target);
  }

 private:
  std::size_t classes_;
  std::size_t size_;
  std::vector<float> means_;
};

class MarkovChain final : public Task {
 public:
  MarkovChain(std::int64_t length, std::size_t vocabulary, std::uint64_t seed)
      : Task({{"input", DType::int64, {length}}, {"target", DType::int64, {length}}}),
        length_(static_cast<std::size_t>(length)),
        vocabulary_(vocabulary),
        successors_(successors * vocabulary) {
    Random random = random_of(seed, Stream::task);
    for (std::int64_t& successor : successors_)
      successor = static_cast<std::int64_t>(random.below(vocabulary_));
  }

  void write(Random random, ElementWriter& element) const override {
    auto* input = reinterpret_cast<std::int64_t*>(element.bytes(0).data());
    auto* target = reinterpret_cast<std::int64_t*>(element.bytes(1).data());
    auto token = static_cast<std::int64_t>(random.below(vocabulary_));
    for (std::size_t t = 0; t < length_; ++t) {
      input[t] = token;
      // 0, 1, 2 leading zeros come with probability 1/2, 1/4, 1/8; three or more count as one case.
      const auto rank = std::min<std::size_t>(std::countl_zero(random.next()), successors - 1);
      token = successors_[successors * static_cast<std::size_t>(token) + rank];
      target[t] = token;
    }
  }

 private:
  static constexpr std::size_t successors = 4;
  std::size_t length_;
  std::size_t vocabulary_;
  std::vector<std::int64_t> successors_;
};

class SyntheticSource final : public BatchSource {
 public:
  /// `elements`, `epochs`: 0 means endless.
  SyntheticSource(std::shared_ptr<const Task> task, std::uint64_t seed, Stream stream, std::uint64_t elements,
                  std::uint64_t epochs)
      : task_(std::move(task)), seed_(seed), stream_(stream), elements_(elements), epochs_(epochs) {}

  std::span<const FieldSpec> fields() const override { return task_->fields(); }

  bool next(ElementWriter& element) override {
    if (elements_ > 0 && index_ == elements_) {
      if (epochs_ > 0 && epoch_ + 1 == epochs_) return false;
      ++epoch_;
      index_ = 0;
    }
    task_->write(random_of(seed_, stream_, index_++), element);
    return true;
  }

  std::optional<std::string> state() const override {
    return write_position(kind(), identity(), {epoch_, index_});
  }

  void restore(const std::string& state) override {
    const auto at = read_position(state, kind(), identity(), epochs_);
    if (elements_ > 0) check_position(at, elements_);
    epoch_ = at.epoch;
    index_ = at.position;
  }

  std::unique_ptr<BatchSource> held_out() override {
    if (stream_ == Stream::held_out) return nullptr;
    return std::make_unique<SyntheticSource>(task_, seed_, Stream::held_out, synthetic_held_out_elements, 1);
  }

 private:
  std::string kind() const { return stream_ == Stream::training ? "synthetic" : "synthetic-held-out"; }
  Identity identity() const { return {{"seed", seed_}, {"elements", elements_}}; }

  std::shared_ptr<const Task> task_;
  std::uint64_t seed_;
  Stream stream_;
  std::uint64_t elements_;
  std::uint64_t epochs_;
  std::uint64_t epoch_ = 0;
  std::uint64_t index_ = 0;
};

std::int64_t at_least(std::int64_t least, std::int64_t value, const char* key) {
  if (value < least)
    throw ConfigError(fmt::format("{} is {}; it must be at least {}", key, value, least), key);
  return value;
}

std::shared_ptr<const Task> mlp_task(const MlpConfig& mlp, std::uint64_t seed) {
  const auto size = at_least(1, mlp.input_size, "model.mlp.input_size");
  const auto classes = at_least(1, mlp.output_size, "model.mlp.output_size");
  return std::make_shared<Classes>(std::vector{size}, static_cast<std::size_t>(classes), seed);
}

std::shared_ptr<const Task> convnet_task(const ConvNetConfig& net, std::uint64_t seed) {
  const auto channels = at_least(1, net.input_channels, "model.convnet.input_channels");
  const auto side = at_least(1, net.image_size, "model.convnet.image_size");
  const auto classes = at_least(1, net.classes, "model.convnet.classes");
  return std::make_shared<Classes>(std::vector{channels, side, side}, static_cast<std::size_t>(classes),
                                   seed);
}

std::shared_ptr<const Task> gpt_task(const GptConfig& gpt, int sequence_length, std::uint64_t seed) {
  const auto length = at_least(1, sequence_length, "data.sequence_length");
  const auto vocabulary = at_least(1, gpt.vocabulary, "model.gpt.vocabulary");
  if (length > gpt.context) {
    throw ConfigError(
        fmt::format("data.sequence_length is {}; it must be at most model.gpt.context, which is {}", length,
                    gpt.context),
        "data.sequence_length");
  }
  return std::make_shared<MarkovChain>(length, static_cast<std::size_t>(vocabulary), seed);
}

std::shared_ptr<const Task> task_of(const Config& config) {
  const ModelConfig& model = config.model;
  if (model.kind == "mlp") return mlp_task(model.mlp, config.data.seed);
  if (model.kind == "convnet") return convnet_task(model.convnet, config.data.seed);
  if (model.kind == "gpt") return gpt_task(model.gpt, config.data.sequence_length, config.data.seed);
  throw ConfigError(
      fmt::format(
          "data.kind is synthetic, which is for the models mlp, convnet and gpt only, but model.kind is "
          "'{}': register a data source that fits this model, and set data.kind to its name",
          model.kind),
      "data.kind");
}

}  // namespace

std::unique_ptr<BatchSource> synthetic_source(const Config& config) {
  const auto elements = at_least(0, config.data.elements, "data.elements");
  const auto epochs = at_least(0, config.data.epochs, "data.epochs");
  return std::make_unique<SyntheticSource>(task_of(config), config.data.seed, Stream::training,
                                           static_cast<std::uint64_t>(elements),
                                           static_cast<std::uint64_t>(epochs));
}

}  // namespace accelmgr::data
