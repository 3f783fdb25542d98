// The GPUs that the fakes of NVIDIA's driver and of its management library show, as variables of the
// environment say.
//
//   FAKE_DRIVER_GPUS    how many GPUs the machine has; 2 if it is not set
//   FAKE_DRIVER_MACHINE a number in the UUIDs, in place of their last four bytes: tests that run at the same
//                       time have different GPUs
//   FAKE_DRIVER_SLICES  "3,,0": MIG mode of the first and of the third GPU is on, with three slices and none
#pragma once

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/split.hpp"

namespace accelmgr::test {

inline std::string variable(const char* name, const char* otherwise = "") {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

/// A GPU, or a slice of one.
struct FakeDevice {
  static constexpr int whole = -1, most_slices = 7;

  int gpu = 0, slice = whole;

  static FakeDevice of(int number) { return {number / (most_slices + 1), number % (most_slices + 1) - 1}; }
  int number() const { return gpu * (most_slices + 1) + slice + 1; }

  std::string name() const {
    return std::string("Fake GPU ") + char('A' + gpu) + (slice == whole ? "" : " MIG 1g.5gb");
  }
  std::size_t memory_bytes() const {
    return slice == whole ? std::size_t(gpu + 1) << 34 : std::size_t{5} << 30;
  }
  std::array<unsigned char, 16> uuid() const {
    std::array<unsigned char, 16> bytes{};
    for (unsigned i = 0; i < 16; ++i) bytes.at(i) = static_cast<unsigned char>(0xa0 + 16 * gpu + int(i));
    if (slice != whole) bytes[4] = static_cast<unsigned char>(slice);
    if (const auto machine = variable("FAKE_DRIVER_MACHINE"); !machine.empty())
      for (unsigned i = 0; i < 4; ++i)
        bytes.at(12 + i) = static_cast<unsigned char>(std::stoi(machine) >> (24 - 8 * i));
    return bytes;
  }
  /// As NVIDIA's programs write it.
  std::string uuid_text() const {
    std::string text = slice == whole ? "GPU-" : "MIG-";
    for (unsigned i = 0; const unsigned char byte : uuid()) {
      if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
      text += "0123456789abcdef"[byte / 16];
      text += "0123456789abcdef"[byte % 16];
      ++i;
    }
    return text;
  }
};

inline int gpu_count() { return std::stoi(variable("FAKE_DRIVER_GPUS", "2")); }

/// -1 if its MIG mode is off.
inline int slice_count(int gpu) {
  const auto counts = base::split(variable("FAKE_DRIVER_SLICES"), ',');
  const auto index = static_cast<std::size_t>(gpu);
  return index < counts.size() && !counts[index].empty() ? std::stoi(counts[index]) : -1;
}

/// What programs can compute on there: the GPU, or its slices.
inline std::vector<FakeDevice> usable(int gpu) {
  if (slice_count(gpu) < 0) return {{gpu}};
  std::vector<FakeDevice> slices;
  for (int slice = 0; slice < slice_count(gpu); ++slice) slices.push_back({gpu, slice});
  return slices;
}

}  // namespace accelmgr::test
