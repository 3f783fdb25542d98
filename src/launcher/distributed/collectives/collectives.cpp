
#include "accelmgr/distributed_context.hpp"
#include "launcher/distributed/collectives/arrays.hpp"
#include "launcher/distributed/collectives/objects.hpp"

namespace accelmgr::distributed {
namespace {

std::vector<std::string> gathered(const std::string& text, ObjectKind kind, const GroupArgument& group) {
  const auto members = members_of(group);
  if (!members.communicate()) return {text};
  const auto& ranks = members.communicator->ranks();
  auto texts = members.communicator->all_gather_objects(encode_text(text, kind));
  for (std::size_t i = 0; i < texts.size(); ++i) texts[i] = decode_text(texts[i], ranks[i], kind);
  return texts;
}

}  // namespace

void barrier() {
  const auto members = members_of({});
  if (members.communicate()) members.communicator->barrier();
}

double all_reduce(double number, const std::string& op, const GroupArgument& group) {
  const auto operation = reduce_op(op);
  const auto members = members_of(group);
  if (!members.communicate()) return number;
  double result = 0;
  members.communicator->all_reduce(&number, &result, 1, DType::float64, operation);
  return result;
}

std::vector<std::string> all_gather(const std::string& text, const GroupArgument& group) {
  return gathered(text, ObjectKind::text, group);
}

std::vector<std::string> all_gather_bytes(const std::string& bytes, const GroupArgument& group) {
  return gathered(bytes, ObjectKind::bytes, group);
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

}  // namespace accelmgr::distributed
