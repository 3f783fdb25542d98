// Shared by the tests of checkpoints: small sample checkpoints, and functions that look at files and change
// them.
#pragma once

#include <gtest/gtest.h>
#include <stdio.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/safetensors_layout.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::checkpoint::test {

namespace fs = std::filesystem;
using accelmgr::test::message_of;
using accelmgr::test::TemporaryFolder;
using Names = std::set<std::string>;

inline Names names_in(const fs::path& directory) {
  Names names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename().string());
  return names;
}

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// The bytes of a safetensors file that holds one vector.
inline std::vector<std::byte> image_of(const std::string& name, const std::vector<float>& values) {
  const auto bytes = values.size() * sizeof(float);
  const SafetensorsLayout layout({{name, "F32", {static_cast<std::int64_t>(values.size())}, bytes, {}}});
  std::vector<std::byte> image(layout.total_bytes());
  layout.write_header(image.data());
  std::memcpy(image.data() + layout.offset(0), values.data(), bytes);
  return image;
}

inline std::vector<float> values_of(const Tensor& tensor) {
  std::vector<float> values(tensor.bytes.size() / sizeof(float));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

/// The contents of a checkpoint. Step and run determine every value, so that is_sample() can tell samples
/// apart.
class Sample {
 public:
  explicit Sample(std::uint64_t step, std::optional<double> metric = {}, float run = 0,
                  std::size_t values = 16)
      : model_(image_of("weight", std::vector<float>(values, static_cast<float>(step) + run))),
        training_(
            image_of("optimizer/0/exp_avg", std::vector<float>(values, -static_cast<float>(step) - run))),
        contents_{step, metric, model_, training_, {{"run", run}}} {}
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;

  const Contents& contents() const { return contents_; }

 private:
  std::vector<std::byte> model_, training_;
  Contents contents_;
};

inline Written write_sample(const fs::path& directory, std::uint64_t step, std::optional<double> metric = {},
                            float run = 0, std::int64_t keep = 100) {
  return write(directory, Sample(step, metric, run).contents(), keep);
}

/// Succeeds if all parts of `checkpoint` are those of the sample of `step` and `run`.
inline ::testing::AssertionResult is_sample(const Checkpoint& checkpoint, std::uint64_t step, float run = 0) {
  const auto value = static_cast<float>(step) + run;
  const auto model = values_of(checkpoint.model.tensor("weight"));
  const auto training = values_of(checkpoint.training.tensor("optimizer/0/exp_avg"));
  if (checkpoint.step != step) return ::testing::AssertionFailure() << "step " << checkpoint.step;
  if (checkpoint.state != nlohmann::json{{"run", run}})
    return ::testing::AssertionFailure() << "state " << checkpoint.state;
  if (model.empty() || model != std::vector<float>(model.size(), value))
    return ::testing::AssertionFailure() << "another model";
  if (training != std::vector<float>(model.size(), -value))
    return ::testing::AssertionFailure() << "another training state";
  return ::testing::AssertionSuccess();
}

/// For a forked child that expects "permission denied": root is never refused, so a child that runs as root
/// becomes the user `nobody` for good. Throws if it cannot.
inline void become_unprivileged() {
  constexpr id_t nobody = 65534;
  if (geteuid() == 0 && (setresgid(nobody, nobody, nobody) != 0 || setresuid(nobody, nobody, nobody) != 0))
    throw std::runtime_error("this process could not give up its privileges");
}

/// The exit code of a forked child that checks expectations: 1 if one of them failed, otherwise 0.
inline int exit_code() {
  fflush(nullptr);
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace accelmgr::checkpoint::test
