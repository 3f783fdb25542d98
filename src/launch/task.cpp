#include "launch/task.hpp"

#include <fmt/format.h>

namespace accelmgr::launch {
namespace {

std::string to_text(const Value& value) {
  std::string text;
  Value::to_cbor(value, text);
  return text;
}

template <class Take>
auto from_text(const std::string& text, const char* name, Take take) {
  try {
    return take(Value::from_cbor(text));
  } catch (const Value::exception& error) {
    throw SessionError(fmt::format("what came is no {} of a launch: {}", name, error.what()));
  }
}

Value value_of(const Failure& failure) {
  return {{"rank", failure.rank},   {"exit_code", failure.exit_code}, {"signal", failure.signal},
          {"phase", failure.phase}, {"type", failure.type},           {"what", failure.what},
          {"trace", failure.trace}, {"time_s", failure.time_s}};
}

Failure failure_of(const Value& value) {
  Failure failure;
  value.at("rank").get_to(failure.rank);
  value.at("exit_code").get_to(failure.exit_code);
  value.at("signal").get_to(failure.signal);
  value.at("phase").get_to(failure.phase);
  value.at("type").get_to(failure.type);
  value.at("what").get_to(failure.what);
  value.at("trace").get_to(failure.trace);
  value.at("time_s").get_to(failure.time_s);
  return failure;
}

}  // namespace

std::string encode(const Order& order) {
  return to_text({{"rank", order.rank},
                  {"environment", order.environment},
                  {"targets", order.targets},
                  {"program", order.program},
                  {"execute_self", order.execute_self},
                  {"call", order.call}});
}

Order decode_order(const std::string& text) {
  return from_text(text, "order", [](const Value& value) {
    Order order;
    value.at("rank").get_to(order.rank);
    value.at("environment").get_to(order.environment);
    value.at("targets").get_to(order.targets);
    value.at("program").get_to(order.program);
    value.at("execute_self").get_to(order.execute_self);
    value.at("call").get_to(order.call);
    return order;
  });
}

std::string encode(const Call& call) {
  return to_text({{"setup", call.setup}, {"function", call.function}, {"args", call.args}});
}

Call decode_call(const std::string& text) {
  return from_text(text, "call", [](Value value) {
    Call call;
    value.at("setup").get_to(call.setup);
    value.at("function").get_to(call.function);
    call.args = std::move(value.at("args"));
    return call;
  });
}

std::string encode(const Report& report) {
  auto value = Value::object();
  if (report.result) value["result"] = *report.result;
  if (report.failure) value["failure"] = value_of(*report.failure);
  return to_text(value);
}

Report decode_report(const std::string& text) {
  return from_text(text, "report", [](Value value) {
    Report report;
    if (value.contains("result")) report.result = std::move(value.at("result"));
    if (value.contains("failure")) report.failure = failure_of(value.at("failure"));
    return report;
  });
}

}  // namespace accelmgr::launch
