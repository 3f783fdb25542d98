// What a runner is to its replica, for tests.
#pragma once

#include <cstddef>
#include <span>

#include "engine/replica/replica.hpp"

namespace accelmgr::test {

/// Wants everything and keeps nothing, unless a derived class says otherwise.
class RunnerSide : public replica::GradientSink,
                   public replica::GradientPlaces,
                   public replica::ParameterSource,
                   public replica::Progress {
 public:
  void capture(std::size_t, const void*) override {}
  void backward_begins() override {}
  bool wanted() override { return true; }

  replica::Binding binding(const session::Manifest& manifest, std::span<const replica::Place> places = {}) {
    return {manifest, places, *this, *this, *this, *this};
  }
};

}  // namespace accelmgr::test
