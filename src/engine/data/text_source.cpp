#include "engine/data/text_source.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "engine/data/random.hpp"
#include "engine/data/source_position.hpp"
#include "engine/data/text_corpus.hpp"

namespace accelmgr::data {
namespace {

// The windows of an epoch, as pointers into documents that outlive it. So an element costs only a pass over
// its bytes.
class Windows {
 public:
  explicit Windows(std::size_t length) : length_(length) {
    const auto size = static_cast<std::int64_t>(length);
    fields_ = {{"input", DType::int64, {size}}, {"target", DType::int64, {size}}};
  }

  std::span<const FieldSpec> fields() const { return fields_; }

  void clear() {
    windows_.clear();
    position_ = 0;
  }

  std::size_t size() const { return windows_.size(); }
  std::size_t position() const { return position_; }
  void seek(std::size_t position) { position_ = position; }

  void cut(const Document& document, std::size_t phase) {
    const auto* text = reinterpret_cast<const unsigned char*>(document.text.data());
    for (std::size_t begin = phase; begin + length_ < document.text.size(); begin += length_) {
      windows_.push_back(text + begin);
    }
  }

  void shuffle(Random& random) { random.shuffle(std::span(windows_)); }

  /// Returns false when all windows have been written.
  bool write_next(ElementWriter& element) {
    if (position_ == windows_.size()) return false;
    const unsigned char* window = windows_[position_++];
    std::copy_n(window, length_, reinterpret_cast<std::int64_t*>(element.bytes(0).data()));
    std::copy_n(window + 1, length_, reinterpret_cast<std::int64_t*>(element.bytes(1).data()));
    return true;
  }

 private:
  std::size_t length_;
  std::vector<FieldSpec> fields_;
  std::vector<const unsigned char*> windows_;
  std::size_t position_ = 0;
};

class HeldOutText final : public BatchSource {
 public:
  HeldOutText(std::shared_ptr<const TextCorpus> corpus, std::size_t length)
      : corpus_(std::move(corpus)), windows_(length) {
    for (const Document& document : corpus_->held_out) windows_.cut(document, 0);
  }

  std::span<const FieldSpec> fields() const override { return windows_.fields(); }
  bool next(ElementWriter& element) override { return windows_.write_next(element); }

 private:
  std::shared_ptr<const TextCorpus> corpus_;
  Windows windows_;
};

class TrainingText final : public BatchSource {
 public:
  TrainingText(std::shared_ptr<const TextCorpus> corpus, const DataConfig& config)
      : corpus_(std::move(corpus)),
        length_(static_cast<std::size_t>(config.sequence_length)),
        epochs_(static_cast<std::uint64_t>(config.epochs)),
        seed_(config.seed),
        identity_{{"seed", seed_},
                  {"documents", corpus_->training.size()},
                  {"bytes", total_bytes(corpus_->training)},
                  {"sequence_length", length_}},
        windows_(length_) {}

  std::span<const FieldSpec> fields() const override { return windows_.fields(); }

  bool next(ElementWriter& element) override {
    return windows_.write_next(element) || (start_epoch() && windows_.write_next(element));
  }

  std::optional<std::string> state() const override {
    const auto epoch = started_ == 0 ? 0 : started_ - 1;
    return write_position(kind, identity_, {epoch, windows_.position()});
  }

  void restore(const std::string& state) override {
    const auto at = read_position(state, kind, identity_, epochs_);
    started_ = at.epoch;
    start_epoch();
    check_position(at, windows_.size());
    windows_.seek(at.position);
  }

  std::unique_ptr<BatchSource> held_out() override {
    if (corpus_->held_out.empty()) return nullptr;
    return std::make_unique<HeldOutText>(corpus_, length_);
  }

 private:
  static constexpr const char* kind = "text";

  bool start_epoch() {
    if (epochs_ > 0 && started_ == epochs_) return false;
    Random random(seed_, started_++);
    windows_.clear();
    for (const Document& document : corpus_->training) {
      // A document of fewer than two windows must not lose its only window to the phase.
      const std::size_t phases = std::min(length_, document.text.size() - length_);
      windows_.cut(document, random.below(phases));
    }
    windows_.shuffle(random);
    return true;
  }

  std::shared_ptr<const TextCorpus> corpus_;
  std::size_t length_;
  std::uint64_t epochs_;
  std::uint64_t seed_;
  Identity identity_;
  std::uint64_t started_ = 0;
  Windows windows_;
};

void check_config(const Config& config) {
  const DataConfig& data = config.data;
  if (data.sequence_length < 1) {
    throw ConfigError(fmt::format("data.sequence_length is {}; it must be at least 1", data.sequence_length),
                      "data.sequence_length");
  }
  if (data.epochs < 0) {
    throw ConfigError(fmt::format("data.epochs is {}; it must be 1 or more, or 0 for endless", data.epochs),
                      "data.epochs");
  }
  if (config.model.kind != "gpt") return;
  const GptConfig& gpt = config.model.gpt;
  if (data.sequence_length > gpt.context) {
    throw ConfigError(
        fmt::format("data.sequence_length is {}; it must be at most model.gpt.context, which is {}",
                    data.sequence_length, gpt.context),
        "data.sequence_length");
  }
  if (gpt.vocabulary < 256) {
    throw ConfigError(
        fmt::format("model.gpt.vocabulary is {}; the bytes of text need at least 256", gpt.vocabulary),
        "model.gpt.vocabulary");
  }
}

void check_lengths(std::span<const Document> documents, std::size_t sequence_length) {
  for (const Document& document : documents) {
    if (document.text.size() > sequence_length) continue;
    throw DataError(
        fmt::format("data.files: '{}' has {} bytes, but one element takes {} (data.sequence_length {}, and "
                    "the byte that follows): "
                    "leave the file out, or use a shorter sequence",
                    document.path, document.text.size(), sequence_length + 1, sequence_length));
  }
}

}  // namespace

std::unique_ptr<BatchSource> text_source(const Config& config) {
  check_config(config);
  auto corpus = std::make_shared<const TextCorpus>(read_corpus(config.data.files, config.data.held_out));
  const auto length = static_cast<std::size_t>(config.data.sequence_length);
  check_lengths(corpus->training, length);
  check_lengths(corpus->held_out, length);
  return std::make_unique<TrainingText>(std::move(corpus), config.data);
}

}  // namespace accelmgr::data
