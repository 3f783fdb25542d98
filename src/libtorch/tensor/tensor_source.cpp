#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cstring>
#include <numeric>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "engine/data/element.hpp"
#include "engine/data/random.hpp"
#include "engine/data/source_position.hpp"
#include "libtorch/tensor/convert.hpp"

namespace accelmgr {
namespace {

class TensorSource final : public BatchSource {
 public:
  TensorSource(std::vector<FieldSpec> fields, std::vector<at::Tensor> tensors, int epochs, std::uint64_t seed)
      : fields_(std::move(fields)), tensors_(std::move(tensors)), epochs_(epochs), seed_(seed) {
    for (const FieldSpec& field : fields_) row_bytes_.push_back(field.bytes());
    order_.resize(static_cast<std::size_t>(tensors_.front().size(0)));
    start_epoch(0);
  }

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    if (position_ == order_.size()) {
      if (epochs_ > 0 && epoch_ + 1 >= static_cast<std::uint64_t>(epochs_)) return false;
      start_epoch(epoch_ + 1);
    }
    const std::size_t row = order_[position_++];
    for (std::size_t f = 0; f < tensors_.size(); ++f) {
      const auto* values = static_cast<const std::byte*>(tensors_[f].const_data_ptr());
      std::memcpy(element.bytes(f).data(), values + row * row_bytes_[f], row_bytes_[f]);
    }
    return true;
  }

  std::optional<std::string> state() const override {
    return data::write_position(kind, identity(), {epoch_, position_});
  }

  void restore(const std::string& state) override {
    const auto at = data::read_position(state, kind, identity(), static_cast<std::uint64_t>(epochs_));
    data::check_position(at, order_.size());
    start_epoch(at.epoch);
    position_ = at.position;
  }

 private:
  static constexpr const char* kind = "tensors";

  data::Identity identity() const { return {{"seed", seed_}, {"elements", order_.size()}}; }

  // Shuffles the identity anew for each epoch, so that the order depends on (seed, epoch) alone.
  void start_epoch(std::uint64_t epoch) {
    epoch_ = epoch;
    position_ = 0;
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    if (seed_ != 0) data::Random(seed_, epoch).shuffle(std::span(order_));
  }

  std::vector<FieldSpec> fields_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> row_bytes_;
  std::vector<std::size_t> order_;
  int epochs_;
  std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
  std::size_t position_ = 0;
};

// Returns the tensor with contiguous rows that can be copied byte by byte.
at::Tensor plain_rows(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw DataError(fmt::format("tensor '{}' is undefined", name));
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || tensor.is_quantized()) {
    throw DataError(fmt::format("tensor '{}' is a {}; it must be dense, unquantized and on the CPU", name,
                                tensor.toString()));
  }
  if (tensor.dim() == 0) {
    throw DataError(
        fmt::format("tensor '{}' is a single number; its first dimension must count the elements", name));
  }
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

DType dtype_of(const std::string& name, const at::Tensor& tensor) {
  try {
    return tensor::dtype_of(tensor.scalar_type());
  } catch (const ModelError& error) {
    throw DataError(fmt::format("tensor '{}': {}", name, error.what()));
  }
}

}  // namespace

std::unique_ptr<BatchSource> tensor_source(std::vector<std::pair<std::string, at::Tensor>> tensors,
                                           int epochs, std::uint64_t seed) {
  if (tensors.empty()) throw DataError("a source of tensors needs at least one tensor");
  if (epochs < 0)
    throw DataError(fmt::format("epochs is {}; it must be 1 or more, or 0 for endless", epochs));
  std::vector<FieldSpec> fields;
  std::vector<at::Tensor> rows;
  for (const auto& [name, tensor] : tensors) {
    rows.push_back(plain_rows(name, tensor));
    fields.push_back({name, dtype_of(name, tensor), tensor.sizes().slice(1).vec()});
    if (tensor.size(0) != rows.front().size(0)) {
      throw DataError(fmt::format("tensor '{}' has {} elements, but tensor '{}' has {}", name, tensor.size(0),
                                  fields.front().name, rows.front().size(0)));
    }
  }
  if (rows.front().size(0) == 0)
    throw DataError(fmt::format("tensor '{}' has no elements", fields.front().name));
  data::check_fields(fields);
  return std::make_unique<TensorSource>(std::move(fields), std::move(rows), epochs, seed);
}

}  // namespace accelmgr
