// The staged source. It gives endless elements of a sine, unless its script or its options say otherwise.
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>

#include "stage.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::size_t source_inputs = 8;

/// The number in an option; -1: the option is not set.
std::int64_t number(const Config& config, const char* name) {
  return std::stoll(option_of(config.data.options, name, "-1"));
}

class StagedSource final : public BatchSource {
 public:
  explicit StagedSource(const Config& config)
      : map_(open_script(config.model.options.at("stage"))),
        elements_(config.data.elements),
        throw_at_(number(config, "throw_at")),
        fork_at_(number(config, "fork_at")),
        execute_at_(number(config, "execute_at")) {}

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    if (elements_ > 0 && index_ == elements_) return false;
    wait_until_released();
    if (index_ == fork_at_) fork_child(script_in(map_), script_in(map_).child_of_source);
    if (index_ == execute_at_) execute_child(script_in(map_), script_in(map_).child_of_source);
    if (index_ == throw_at_) throw std::runtime_error("drawer 7 is on fire");
    float input[source_inputs], sum = 0;
    for (std::size_t i = 0; i < source_inputs; ++i) {
      input[i] = static_cast<float>(std::sin(double(index_) * source_inputs + double(i) + 1));
      sum += input[i];
    }
    std::memcpy(element.bytes(0).data(), input, sizeof input);
    std::memcpy(element.bytes(1).data(), &sum, sizeof sum);
    std::memcpy(element.bytes(2).data(), &index_, sizeof index_);
    ++index_;
    return true;
  }

 private:
  void wait_until_released() {
    auto& script = script_in(map_);
    for (;;) {
      const auto seen = ipc::load(script.told);
      const auto from = script.withheld_from.load();
      if (from == 0 || index_ < from) break;
      if (!script.withheld.exchange(true)) ipc::advance(script.heard);
      ipc::wait_changed(script.told, seen, stage_slice_ns, 0);
    }
    script.withheld.store(false);
  }

  ipc::Mapping map_;
  std::vector<FieldSpec> fields_{{"input", DType::float32, {std::int64_t{source_inputs}}},
                                 {"target", DType::float32, {1}},
                                 {"index", DType::int64, {}}};
  std::int64_t elements_;
  std::int64_t throw_at_;
  std::int64_t fork_at_;
  std::int64_t execute_at_;
  std::int64_t index_ = 0;
};

const RegisteredData source(staged,
                            [](const Config& config) { return std::make_unique<StagedSource>(config); });

}  // namespace
}  // namespace accelmgr::test
