#include <fmt/format.h>

#include <cctype>
#include <nlohmann/json.hpp>
#include <string_view>

#include "engine/service/route.hpp"
#include "engine/service/status.hpp"

namespace accelmgr::service {
namespace {

using nlohmann::json;

/// The answers, by the names that routes call them, but for status_schemas().
constexpr const char* schemas = R"json({
  "Alive": {"required": ["alive"], "properties": {"alive": {"const": true}}},
  "Ready": {"required": ["ready"], "properties": {"ready": {"const": true}}},
  "Zeroed": {"required": ["zeroed"], "properties": {"zeroed": {"const": true}}},
  "Stopping": {"required": ["stopping"], "properties": {"stopping": {"const": true}}},
  "OpenApi": {"required": ["openapi", "paths"]},
  "Error": {
    "required": ["error"],
    "properties": {"error": {
      "type": "object",
      "required": ["code", "message", "rank", "step", "hint"],
      "properties": {
        "code": {"type": "string", "description": "For programs"},
        "message": {"type": "string", "description": "For people"},
        "rank": {"type": ["integer", "null"], "description": "The runner that it is about"},
        "step": {"type": ["integer", "null"]},
        "hint": {"type": ["string", "null"], "description": "What to do"}}}}},
  "Runners": {
    "required": ["runners"],
    "properties": {"runners": {"type": "array", "items": {"$ref": "#/components/schemas/Runner"}}}},
  "Step": {
    "required": ["status", "counted", "step", "attempt", "loss", "samples", "participants", "tries", "step_ms",
                 "compute_ms", "reduce_ms", "wait_ms", "data_ms"],
    "properties": {
      "number": {"type": "integer", "description": "Counts the calls of step()"},
      "time_s": {"type": "number", "description": "When it returned, since 1970"},
      "status": {"enum": ["ok", "data_end", "runner_lost", "nonfinite", "timeout", "manager_lost"]},
      "counted": {"type": "boolean"},
      "step": {"type": "integer", "description": "Of the run; of a step that did not count, the last one that did"},
      "attempt": {"type": "integer"},
      "loss": {"type": ["number", "null"], "description": "null: not finite"},
      "samples": {"type": "integer"},
      "participants": {"type": "integer"},
      "tries": {"type": "integer"},
      "step_ms": {"type": "number"},
      "compute_ms": {"type": "number"},
      "reduce_ms": {"type": "number"},
      "wait_ms": {"type": "number"},
      "data_ms": {"type": "number", "description": "Of the runner that waited longest for batches"}}},
  "Steps": {
    "required": ["steps", "first", "next"],
    "properties": {
      "steps": {"type": "array", "items": {"$ref": "#/components/schemas/Step"}},
      "first": {"type": "integer", "description": "The number of the first one that is kept"},
      "next": {"type": "integer", "description": "The `since` of the next request"}}},
  "StepsMade": {
    "required": ["steps"],
    "properties": {
      "steps": {"type": "array", "items": {"$ref": "#/components/schemas/Step"}},
      "pending": {"type": "integer", "description": "How many steps have begun, for a request that does not wait"}}},
  "Pending": {
    "required": ["count", "made", "under_way", "error", "steps"],
    "properties": {
      "count": {"type": "integer", "description": "How many were asked for; 0: none were ever begun"},
      "made": {"type": "integer", "description": "Those whose results there are, the last one's error included"},
      "under_way": {"type": "boolean"},
      "error": {"type": ["string", "null"], "description": "What ended them, if it is not in the last result"},
      "steps": {"type": "array", "items": {"$ref": "#/components/schemas/Step"}}}},
  "Trace": {
    "required": ["threads", "next", "more"],
    "properties": {
      "threads": {"type": "array", "items": {"type": "object"}},
      "next": {"type": "string", "description": "The `since` of the next request"},
      "more": {"type": "boolean", "description": "The next request need not wait"}}},
  "Checkpoint": {
    "required": ["step", "path", "bytes", "write_ms", "warnings"],
    "properties": {
      "step": {"type": "integer"},
      "path": {"type": "string"},
      "bytes": {"type": "integer"},
      "write_ms": {"type": "number"},
      "warnings": {"type": "array", "items": {"type": "string"}}}}
})json";

json schema_of(const Parameter& parameter, int highest_rank) {
  switch (parameter.type) {
    case Parameter::Type::integer: {
      // The session may have fewer ranks than there can be.
      const auto most = std::string_view(parameter.name) == "rank" ? static_cast<std::uint64_t>(highest_rank)
                        : std::string_view(parameter.name) == "runners"
                            ? static_cast<std::uint64_t>(highest_rank) + 1
                            : parameter.most;
      return {{"type", "integer"}, {"minimum", parameter.least}, {"maximum", most}};
    }
    case Parameter::Type::number:
      return {{"type", "number"}, {"minimum", parameter.least}, {"maximum", parameter.most}};
    case Parameter::Type::flag:
      return {{"type", "boolean"}};
    case Parameter::Type::position:
      return {{"type", "string"}, {"pattern", R"(^[0-9]{1,18}(\.[0-9]{1,18})?$)"}};
    case Parameter::Type::place:
      return {{"type", "string"}};
  }
  return {};
}

json reference_to(std::string_view schema) {
  return {{"schema", {{"$ref", fmt::format("#/components/schemas/{}", schema)}}}};
}

json answer_of(const Route& route) {
  const std::string_view answer = route.answer;
  if (answer.find('/') != std::string_view::npos) return {{answer, json::object()}};
  return {{"application/json", reference_to(answer)}};
}

json operation_of(const Route& route, int highest_rank) {
  json operation{{"summary", route.summary},
                 {"responses",
                  {{std::string_view(route.path) == "/v1/stop" ? "202" : "200",
                    {{"description", route.summary}, {"content", answer_of(route)}}},
                   {"default",
                    {{"description", "It was refused, or has failed"},
                     {"content", {{"application/json", reference_to("Error")}}}}}}}};
  if (route.is_open) operation["security"] = json::array();
  for (const auto& parameter : route.query)
    operation["parameters"].push_back({{"name", parameter.name},
                                       {"in", "query"},
                                       {"description", parameter.meaning},
                                       {"required", parameter.required},
                                       {"schema", schema_of(parameter, highest_rank)}});
  if (std::string_view(route.method) != "POST") return operation;
  json body{{"type", "object"}, {"additionalProperties", false}, {"properties", json::object()}};
  for (const auto& field : route.body) {
    body["properties"][field.name] = schema_of(field, highest_rank);
    body["properties"][field.name]["description"] = field.meaning;
    if (field.required) body["required"].push_back(field.name);
  }
  operation["requestBody"] = {{"required", body.contains("required")},
                              {"content", {{"application/json", {{"schema", body}}}}}};
  return operation;
}

}  // namespace

std::string openapi_of(const std::vector<Route>& routes, int highest_rank) {
  json description{
      {"openapi", "3.1.0"},
      {"info",
       {{"title", "accelmgr"},
        {"version", ACCELMGR_VERSION},
        {"description", "A service that owns a session"}}},
      {"security", json::array({{{"token", json::array()}}})},
      {"components",
       {{"schemas", json::parse(schemas)},
        {"securitySchemes",
         {{"token", {{"type", "http"}, {"scheme", "bearer"}, {"description", "Over TCP alone"}}}}}}}};
  description["components"]["schemas"].update(status_schemas());
  for (auto& [name, schema] : description["components"]["schemas"].items()) schema["type"] = "object";
  for (const auto& route : routes) {
    std::string method = route.method;
    for (char& letter : method) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    description["paths"][route.path][method] = operation_of(route, highest_rank);
  }
  // These upgrade the connection, which no description of HTTP can say.
  for (const auto* path : {"/v1/attach", "/v1/observe"}) description["paths"].erase(path);
  return description.dump();
}

}  // namespace accelmgr::service
