// What a service says about its session, as JSON. Reads the session's memory alone: no step waits for it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "accelmgr/step_result.hpp"
#include "engine/manager/lease.hpp"
#include "engine/service/service.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::service {

nlohmann::json status_of(Service& service);
nlohmann::json runners_of(Service& service);
nlohmann::json result_of(const StepResult& result);
/// The host that has the lease, or null.
nlohmann::json host_of(const manager::Lease::Standing& lease);
/// The schemas of these, without their type: Status, Runner, Host.
nlohmann::json status_schemas();
/// A step as JSON. As text, because a client may ask for 256 of them: values of nlohmann::json take six times
/// as long.
std::string record_text(std::uint64_t number, const session::StepRecord& record);
nlohmann::json incident_of(std::uint64_t number, const session::Incident& incident);

/// Batches that are loaded for a rank and that no committed step has used.
std::uint64_t queued_batches(const session::Session& session, int rank);

struct NotReady {
  std::string code;
  std::string why;
  std::string hint{};
};
/// Why a host that asked now could make no step; nullopt if it could.
std::optional<NotReady> why_not_ready(Service& service);

}  // namespace accelmgr::service
