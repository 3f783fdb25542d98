#include "engine/client/service_steps.hpp"

#include <fmt/format.h>

#include <concepts>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/timing.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/session/step_fields.hpp"

namespace accelmgr::client {
namespace {

using nlohmann::json;

constexpr StepStatus statuses[]{StepStatus::ok,        StepStatus::data_end, StepStatus::runner_lost,
                                StepStatus::nonfinite, StepStatus::timeout,  StepStatus::manager_lost};

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// Reads the fields of a step by their types.
struct StepReader {
  const json& step;
  base::Fields fields{step, "a step in the service's answer"};

  void read(const char* name, StepStatus& into) const {
    const auto status = fields.text(name);
    for (const auto known : statuses)
      if (status == to_string(known)) into = known;
  }
  void read(const char* name, bool& into) const { into = fields.flag(name); }
  void read(const char* name, std::string& into) const { into = fields.text(name); }
  void read(const char* name, double& into) const { into = fields.real(name); }
  template <std::integral T>
  void read(const char* name, T& into) const {
    into = fields.number<T>(name);
  }
  void read(const char* name, std::vector<std::pair<std::string, double>>& into) const {
    for (const auto& [key, value] : step.at(name).items())
      into.emplace_back(key, value.is_number() ? value.get<double>() : not_a_number);
  }
};

StepResult result_of(const json& step) {
  const StepReader reader{step};
  StepResult result;
  session::each_step_field<session::StepFields::told>([&](const char* name, auto member, const char*) {
    auto& into = result.*member;
    // JSON has no number for what is not finite.
    if constexpr (std::is_same_v<decltype(member), double StepResult::*>)
      if ((member == &StepResult::loss || member == &StepResult::grad_norm) && step.contains(name) &&
          step[name].is_null()) {
        into = not_a_number;
        return;
      }
    reader.read(name, into);
  });
  return result;
}

ServiceAnswer asked(const std::string& path, const std::string& method, const std::string& target,
                    const std::string& body, double timeout_s) {
  const auto deadline = base::Deadline::in_seconds(timeout_s);
  auto answer = ServiceSocket::connect(path, deadline).ask(method, target, "", body, deadline);
  if (answer.status != 200)
    throw SessionError(fmt::format("the service at '{}' refuses: {}", path, error_text(answer)));
  return answer;
}

}  // namespace

void begin_service_steps(const std::string& path, int count, const StepOptions& options, double timeout_s,
                         bool inner) {
  const json body{{"count", count},
                  {"accumulate", options.accumulate},
                  {"update", inner},
                  {"wait", false},
                  {"timeout_s", timeout_s}};
  asked(path, "POST", "/v1/step", body.dump(), timing::service_answer_s);
}

ServiceSteps service_steps(const std::string& path, std::size_t known) {
  const auto answer =
      asked(path, "GET", fmt::format("/v1/pending?since={}", known), "", timing::service_answer_s);
  constexpr const char* what = "the service's answer";
  const auto text = base::parse_json(answer.body, what);
  const base::Fields fields(text, what);
  ServiceSteps steps{.under_way = fields.flag("under_way"),
                     .error = text.contains("error") && text["error"].is_null() ? "" : fields.text("error")};
  fields.objects("steps");  // Or else what follows is no list of objects.
  for (const auto& step : text["steps"]) steps.results.push_back(result_of(step));
  steps.is_all = known + steps.results.size() >= fields.number<std::size_t>("made");
  return steps;
}

void cancel_service_steps(const std::string& path, double timeout_s) {
  asked(path, "POST", "/v1/cancel", "", timeout_s + timing::service_answer_s);
}

}  // namespace accelmgr::client
