// The promises that the model checks in every state.
#include <fmt/format.h>

#include "accelmgr/step_result.hpp"
#include "service_model.hpp"

namespace accelmgr::client::model {

// A host may rest when it is stopped. A service that runs must have finished what is committed, and have the
// lease free again, unless a host that lives has it.
bool ServiceModel::may_rest(const State& s) const {
  bool mapped = false;
  for (const auto& host : s.hosts) {
    if (runs(s, host) && host.pc != Pc::lingers) return false;
    mapped = mapped || (alive(host) && host.pc != Pc::home);
  }
  if (!alive(s.service) || s.service.stopped != 0) return true;
  const auto word = word_of(s);
  if (mapped) return !word.committed(all());
  return word.closed && s.driven == 0 && s.leaving == 0;
}

const char* ServiceModel::wrong(const State& s) const {
  const auto word = word_of(s);
  if (s.twice != 0) return "never twice: a gradient is added to what has it already";
  if (s.torn_gradient != 0) return "never half: gradients that are not whole are applied";
  if (s.save_of_half != 0) return "never half: half-written parameters take the place of a good checkpoint";
  if (s.step_on_half != 0) return "never half: the service makes a step with half-written parameters";
  if (s.refused != 0) return "never lost: the host cannot open an attempt";
  if (s.is_odd != 0 && word.computing(all()))
    return "never half: parameters are written while runners compute with them";
  for (const auto& host : s.hosts) {
    if (!runs(s, host)) continue;
    if (host.pc == Pc::take_result && !word.closed)
      return "never lost: the step ends before its attempt is closed";
    if (host.pc != Pc::found || !word.closed) continue;
    const auto gradients = s.ranks[0].first;
    const auto applied = s.parameters_first | s.parameters_second;
    if (host.left == static_cast<std::uint32_t>(LeftGradients::none))
      for (int rank = 0; rank < options_.ranks; ++rank)
        if ((s.ranks[rank].first | s.ranks[rank].second) != 0)
          return "told: the host does not know of gradients that were left";
    if (host.left == static_cast<std::uint32_t>(LeftGradients::unapplied) &&
        (!whole_gradients(s) || (gradients & applied) != 0))
      return "told: the host takes gradients for whole and unapplied";
  }
  if (word.closed)
    for (int rank = 0; rank < options_.ranks; ++rank)
      if ((s.owed & ~(s.ranks[rank].first & s.ranks[rank].second)) != 0)
        return "never lost: the gradient of a committed step";
  return nullptr;
}

std::string ServiceModel::text(const State& s) const {
  std::string text = session::text_of(word_of(s), all()) + fmt::format(" step {} |", +s.steps);
  for (int rank = 0; rank < options_.ranks; ++rank)
    text +=
        fmt::format(" gradients {:03b} {:03b}{}{} |", +s.ranks[rank].first, +s.ranks[rank].second,
                    s.ranks[rank].in_flight != 0 ? "*" : "", s.runners[rank].stopped != 0 ? " stopped" : "");
  text += fmt::format(" zeroed {} applied {} | parameters {:03b} {:03b}{}{} | lease {}{}", +s.zeroed_step,
                      +s.applied_step, +s.parameters_first, +s.parameters_second, s.is_odd != 0 ? " odd" : "",
                      s.half_written != 0 ? " half" : "", +s.lease, s.leaving != 0 ? " leaving" : "");
  return text;
}

}  // namespace accelmgr::client::model
