#include "table_source.hpp"

#include <cstring>
#include <numeric>

#include "engine/data/random.hpp"
#include "engine/data/source_position.hpp"

namespace accelmgr::test {
namespace {

class TableSource final : public BatchSource {
 public:
  TableSource(std::vector<Column> columns, int epochs, std::uint64_t seed)
      : columns_(std::move(columns)), epochs_(static_cast<std::uint64_t>(epochs)), seed_(seed) {
    for (const auto& column : columns_) fields_.push_back(column.field);
    order_.resize(columns_.at(0).rows.size() / fields_[0].bytes());
    start_epoch(0);
  }

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    if (at_.position == order_.size()) {
      if (epochs_ > 0 && at_.epoch + 1 >= epochs_) return false;
      start_epoch(at_.epoch + 1);
    }
    const auto row = order_[at_.position++];
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      const auto to = element.bytes(f);
      std::memcpy(to.data(), columns_[f].rows.data() + row * to.size(), to.size());
    }
    return true;
  }

  std::optional<std::string> state() const override { return data::write_position("table", {}, at_); }
  void restore(const std::string& state) override {
    const auto at = data::read_position(state, "table", {}, epochs_);
    data::check_position(at, order_.size());
    start_epoch(at.epoch);
    at_ = at;
  }

 private:
  void start_epoch(std::uint64_t epoch) {
    at_ = {.epoch = epoch, .position = 0};
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    if (seed_ != 0) data::Random(seed_, epoch).shuffle(std::span(order_));
  }

  std::vector<Column> columns_;
  std::vector<FieldSpec> fields_;
  std::vector<std::size_t> order_;
  std::uint64_t epochs_, seed_;
  data::SourcePosition at_;
};

}  // namespace

Column numbers(const std::string& name, std::size_t elements) {
  std::vector<std::int64_t> values(elements);
  std::iota(values.begin(), values.end(), 0);
  const auto bytes = std::as_bytes(std::span(values));
  return {{name, DType::int64, {}}, {bytes.begin(), bytes.end()}};
}

std::unique_ptr<BatchSource> table_source(std::vector<Column> columns, int epochs, std::uint64_t seed) {
  return std::make_unique<TableSource>(std::move(columns), epochs, seed);
}

}  // namespace accelmgr::test
