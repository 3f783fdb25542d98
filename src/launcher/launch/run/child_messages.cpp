#include "launcher/launch/run/child_messages.hpp"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/checked_fields.hpp"
#include "base/ipc/socket.hpp"

namespace accelmgr::launch {
namespace {

std::string to_text(const Value& value) {
  std::string text;
  Value::to_cbor(value, text);
  return text;
}

constexpr const char* order_name = "the order of a launch";
constexpr const char* call_name = "the call of a launch";
constexpr const char* report_name = "the report of a launched process";

Value value_of(const Failure& failure) {
  return {{"rank", failure.rank},   {"exit_code", failure.exit_code}, {"signal", failure.signal},
          {"phase", failure.phase}, {"type", failure.type},           {"what", failure.what},
          {"trace", failure.trace}, {"time_s", failure.time_s}};
}

Failure failure_of(const base::Fields& fields) {
  constexpr int last_exit_code = 255;
  Failure failure;
  failure.rank = fields.number<int>("rank", -1);
  const auto exit_code = fields.number<int>("exit_code", 0, last_exit_code);
  const auto signal = fields.number<int>("signal", 0, SIGRTMAX);
  ipc::set_exit(failure, signal != 0 ? signal : W_EXITCODE(exit_code, 0));
  failure.phase = fields.text("phase");
  failure.type = fields.text("type");
  failure.what = fields.text("what");
  failure.trace = fields.text("trace");
  failure.time_s = fields.real("time_s");
  return failure;
}

/// Arguments and variables are C strings for the kernel, so they must not contain NUL.
bool has_nul(const std::string& text) { return text.find('\0') != std::string::npos; }

std::map<std::string, std::string> environment_of(const base::Fields& order) {
  constexpr const char* right =
      "an object whose names and values are strings without NUL, and whose names have no '='";
  const auto& variables = order.value("environment");
  if (!variables.is_object()) order.refuse("environment", right);
  std::map<std::string, std::string> environment;
  for (const auto& [name, value] : variables.items()) {
    const bool is_right = !name.empty() && name.find('=') == std::string::npos && !has_nul(name) &&
                          value.is_string() && !has_nul(value.get_ref<const std::string&>());
    if (!is_right) order.refuse("environment", right);
    environment.emplace(name, value.get<std::string>());
  }
  return environment;
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
  constexpr int last_descriptor = (1 << 20) - 1;  // The default of fs.nr_open, less 1.
  const auto value = base::parse_cbor(text, order_name);
  const base::Fields fields(value, order_name);
  Order order{.rank = fields.number<int>("rank", 0),
              .environment = environment_of(fields),
              .targets = fields.numbers<int>("targets", 0, last_descriptor, ipc::max_packet_fds),
              .program = fields.texts("program"),
              .execute_self = fields.flag("execute_self"),
              .call = fields.flag("call")};
  if (std::any_of(order.program.begin(), order.program.end(), has_nul))
    fields.refuse("program", "a list of strings without NUL");
  return order;
}

std::string encode(const Call& call) {
  return to_text({{"setup", call.setup}, {"function", call.function}, {"args", call.args}});
}

Call decode_call(const std::string& text) {
  auto value = base::parse_cbor(text, call_name);
  const base::Fields fields(value, call_name);
  Call call{.setup = fields.text("setup"), .function = fields.text("function"), .args = {}};
  fields.value("args");
  call.args = std::move(value["args"]);
  return call;
}

std::string encode(const Report& report) {
  auto value = Value::object();
  if (report.result) value["result"] = *report.result;
  if (report.failure) value["failure"] = value_of(*report.failure);
  return to_text(value);
}

Report decode_report(const std::string& text) {
  auto value = base::parse_cbor(text, report_name);
  const base::Fields fields(value, report_name);
  Report report;
  if (fields.has("failure")) report.failure = failure_of(fields.object("failure"));
  if (fields.has("result")) report.result = std::move(value["result"]);
  return report;
}

}  // namespace accelmgr::launch
