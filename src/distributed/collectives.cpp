#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <utility>

#include "accelmgr/distributed.hpp"
#include "distributed/collectives.hpp"
#include "distributed/group.hpp"
#include "distributed/objects.hpp"
#include "distributed/tensors.hpp"

namespace accelmgr::distributed {
namespace {

/// Where a result goes: into the copy that dense() made, if it made one, else into new memory.
at::Tensor place_for_result(const at::Tensor& input, const at::Tensor& dense_input) {
  const bool copied = dense_input.numel() > 0 && dense_input.const_data_ptr() != input.const_data_ptr();
  return copied ? dense_input : empty_like(dense_input, dense_input.sizes());
}

/// Elements of one of `blocks` blocks of dimension 0. When they do not come out even the call is made with
/// none: its members find out together, either that they differ or that all of them were wrong.
class Blocks {
 public:
  Blocks(const at::Tensor& tensor, int blocks)
      : even_(tensor.dim() > 0 && tensor.size(0) % blocks == 0),
        count_(even_ ? count_of(tensor) / static_cast<std::size_t>(blocks) : 0),
        blocks_(blocks) {}
  std::size_t count() const noexcept { return count_; }
  void check(const at::Tensor& tensor, const char* call) const {
    if (even_) return;
    throw UsageError(
        tensor.dim() == 0
            ? fmt::format(
                  "{}: a 0-d tensor has no blocks; dimension 0 is cut into one for each of the {} ranks",
                  call, blocks_)
            : fmt::format("{}: dimension 0 has {} elements, which is no multiple of the {} ranks", call,
                          tensor.size(0), blocks_));
  }

 private:
  bool even_;
  std::size_t count_;
  int blocks_;
};

/// place(dense tensor): where the result goes.
template <class Place>
at::Tensor reduced(const at::Tensor& tensor, const std::string& op, const GroupArgument& group, Place place) {
  const auto operation = reduce_op(op);
  const auto members = members_of(group);
  if (!members.communicate()) return tensor;
  const auto in = dense(tensor, "all_reduce");
  const auto dtype = dtype_of(in.scalar_type());
  check_reduction(dtype, operation);
  auto out = place(in);
  members.communicator->all_reduce(in.const_data_ptr(), out.mutable_data_ptr(), count_of(in), dtype,
                                   operation, options_for(in));
  return out;
}

}  // namespace

void barrier() {
  const auto members = members_of({});
  if (members.communicate()) members.communicator->barrier();
}

at::Tensor all_reduce(const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
  return reduced(tensor, op, group, [&](const at::Tensor& in) { return place_for_result(tensor, in); });
}

const at::Tensor& all_reduce_(const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
  const auto result = reduced(tensor, op, group, [](const at::Tensor& in) { return in; });
  if (result.const_data_ptr() != tensor.const_data_ptr()) tensor.detach().copy_(result);
  return tensor;
}

double all_reduce(double number, const std::string& op, const GroupArgument& group) {
  const auto operation = reduce_op(op);
  const auto members = members_of(group);
  if (!members.communicate()) return number;
  check_reduction(DType::float64, operation);
  double result = 0;
  members.communicator->all_reduce(&number, &result, 1, DType::float64, operation);
  return result;
}

at::Tensor all_gather(const at::Tensor& tensor, const GroupArgument& group) {
  const auto members = members_of(group);
  if (!members.communicate()) return tensor;
  const auto in = dense(tensor, "all_gather");
  auto shape = in.dim() == 0 ? std::vector<std::int64_t>{1} : in.sizes().vec();
  shape[0] *= members.communicator->size();
  auto out = empty_like(in, shape);
  members.communicator->all_gather(in.const_data_ptr(), out.mutable_data_ptr(), count_of(in),
                                   dtype_of(in.scalar_type()), options_for(in));
  return out;
}

at::Tensor all_gather(double number, const GroupArgument& group) {
  return all_gather(at::full({1}, number, at::kDouble), group);
}

std::vector<std::string> all_gather(const std::string& text, const GroupArgument& group) {
  const auto members = members_of(group);
  if (!members.communicate()) return {text};
  const auto& ranks = members.communicator->ranks();
  auto texts = members.communicator->all_gather_objects(encode_text(text));
  for (std::size_t i = 0; i < texts.size(); ++i) texts[i] = decode_text(texts[i], ranks[i]);
  return texts;
}

std::vector<Value> all_gather_object(const Value& object, const GroupArgument& group) {
  const auto members = members_of(group);
  if (!members.communicate()) return {object};
  const auto& ranks = members.communicator->ranks();
  const auto gathered = members.communicator->all_gather_objects(encode_value(object));
  std::vector<Value> objects;
  for (std::size_t i = 0; i < gathered.size(); ++i) objects.push_back(decode_value(gathered[i], ranks[i]));
  return objects;
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
  const auto operation = reduce_op(op);
  const auto members = members_of(group);
  if (!members.communicate()) return tensor;
  const auto in = dense(tensor, "reduce_scatter");
  const auto dtype = dtype_of(in.scalar_type());
  check_reduction(dtype, operation);
  const int size = members.communicator->size();
  const Blocks blocks(in, size);
  auto shape = in.sizes().vec();
  if (!shape.empty()) shape[0] /= size;
  auto out = empty_like(in, shape);
  members.communicator->reduce_scatter(in.const_data_ptr(), out.mutable_data_ptr(), blocks.count(), dtype,
                                       operation, options_for(in));
  blocks.check(in, "reduce_scatter");
  return out;
}

at::Tensor exchange_blocks(const at::Tensor& tensor, const Members& members) {
  const auto in = dense(tensor, "all_to_all");
  const Blocks blocks(in, members.communicator->size());
  auto out = empty_like(in, in.sizes());
  members.communicator->all_to_all(in.const_data_ptr(), out.mutable_data_ptr(), blocks.count(),
                                   dtype_of(in.scalar_type()), options_for(in));
  blocks.check(in, "all_to_all");
  return out;
}

void send_object(const Value& object, int to) {
  const auto members = members_of({});
  check_rank(members.context, "send_object", to, /*other=*/true);
  members.communicator->send(encode_value(object), to);
}

Value receive_object(int from) {
  const auto members = members_of({});
  check_rank(members.context, "receive_object", from, /*other=*/true);
  return decode_value(members.communicator->receive(from), from);
}

void check_rank(const Context& context, const char* call, int rank, bool other) {
  const int size = context.world_size();
  if (rank < 0 || rank >= size)
    throw UsageError(fmt::format("{}: there is no rank {}, in a world of {}", call, rank, size));
  if (other && rank == context.rank())
    throw UsageError(fmt::format("{}: rank {} is this process itself", call, rank));
}

}  // namespace accelmgr::distributed
