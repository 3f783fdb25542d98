#include "engine/client/service_steps.hpp"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/timing.hpp"
#include "engine/client/service_socket.hpp"

namespace accelmgr::client {
namespace {

using nlohmann::json;

constexpr StepStatus statuses[]{StepStatus::ok,        StepStatus::data_end, StepStatus::runner_lost,
                                StepStatus::nonfinite, StepStatus::timeout,  StepStatus::manager_lost};

/// JSON has no number for what is not finite.
double real_or_nan(const json& step, const base::Fields& fields, const char* name) {
  return step.contains(name) && step[name].is_null() ? std::numeric_limits<double>::quiet_NaN()
                                                     : fields.real(name);
}

StepResult result_of(const json& step) {
  const base::Fields fields(step, "a step in the service's answer");
  StepResult result{.counted = fields.flag("counted"),
                    .step = fields.number<std::uint64_t>("step"),
                    .attempt = fields.number<std::uint64_t>("attempt"),
                    .loss = real_or_nan(step, fields, "loss"),
                    .samples = fields.number<std::uint64_t>("samples"),
                    .parameter_version = fields.number<std::uint64_t>("parameter_version"),
                    .nonfinite = fields.flag("nonfinite"),
                    .step_ms = fields.real("step_ms"),
                    .compute_ms = fields.real("compute_ms"),
                    .reduce_ms = fields.real("reduce_ms"),
                    .wait_ms = fields.real("wait_ms"),
                    .data_ms = fields.real("data_ms"),
                    .error = fields.text("error"),
                    .error_type = fields.text("error_type"),
                    .rank = fields.number<int>("rank"),
                    .participants = fields.number<std::uint32_t>("participants"),
                    .tries = fields.number<std::uint32_t>("tries"),
                    .skipped = fields.number<std::uint32_t>("skipped"),
                    .grad_norm = real_or_nan(step, fields, "grad_norm"),
                    .loss_scale = fields.real("loss_scale"),
                    .loss_scale_lowered = fields.number<std::uint32_t>("loss_scale_lowered")};
  const auto status = fields.text("status");
  for (const auto known : statuses)
    if (status == to_string(known)) result.status = known;
  for (const auto& [name, value] : step.at("scalars").items())
    result.scalars.emplace_back(
        name, value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN());
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
