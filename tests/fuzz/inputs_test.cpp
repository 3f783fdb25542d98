// Runs every fuzz target without libFuzzer, on the inputs of its corpus and on changed ones. A seed gives the
// same inputs again.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz_target.hpp"
#include "fuzzed.hpp"
#include "places.hpp"

using Run = int(const std::uint8_t* data, std::size_t size);
extern "C" Run fuzz_configuration, fuzz_http, fuzz_json, fuzz_launch_messages, fuzz_manifest, fuzz_messages,
    fuzz_safetensors, fuzz_session_header, fuzz_settings, fuzz_state_file;

namespace accelmgr::fuzz {
namespace {

using nlohmann::json;
using test::Fuzzed;

constexpr int rounds = 4000;

struct Target {
  const char* name;
  Run* run;
  std::size_t prefix = 0;  ///< Bytes before a text of JSON or CBOR.
  int least_refused = 0;   ///< So many of 100 changed inputs are refused; 0: it does not count them.
  bool is_valid = false;   ///< All of its corpus is taken.
};

void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

constexpr Target targets[] = {{"configuration", fuzz_configuration},
                              {"http", fuzz_http},
                              {"json", fuzz_json},
                              {"launch_messages", fuzz_launch_messages, 1, 25, true},
                              {"manifest", fuzz_manifest, 0, 50, true},
                              {"messages", fuzz_messages, 2, 25, true},
                              {"safetensors", fuzz_safetensors},
                              {"session_header", fuzz_session_header, 0, 50},
                              {"settings", fuzz_settings},
                              {"state_file", fuzz_state_file}};

std::vector<std::string> corpus_of(const Target& target) {
  std::vector<std::string> inputs;
  for (const auto& entry :
       std::filesystem::directory_iterator(test::in_checkout("tests/fuzz/corpus/") + target.name)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::ranges::sort(inputs);  // A folder has no order.
  return inputs;
}

json from_cbor(const std::string& text) try {
  return json::from_cbor(text, true, false);
} catch (const json::exception&) {  // A size that no container has.
  return json(json::value_t::discarded);
}

/// The input with other bytes, or with other values if it is text of JSON or CBOR.
std::string changed(const std::string& input, std::size_t prefix, Fuzzed& fuzzed) {
  if (fuzzed.one_in(10)) return fuzzed.mutated(input);
  const auto begin = input.substr(0, prefix), text = input.substr(begin.size());
  if (fuzzed.one_in(10)) return begin + fuzzed.bytes(200);
  auto value = json::parse(text, nullptr, false);
  const bool is_cbor = value.is_discarded();
  if (is_cbor) value = from_cbor(text);
  if (value.is_discarded() || fuzzed.one_in(3)) return begin + fuzzed.mutated(text);
  value = fuzzed.mutated(std::move(value));
  if (!is_cbor) return begin + value.dump(-1, ' ', false, json::error_handler_t::replace);
  std::string bytes;
  json::to_cbor(value, bytes);
  return begin + bytes;
}

void run(const Target& target, const std::string& input) {
  // A copy of its own, so that a sanitizer sees an access beyond its end.
  const std::vector<std::uint8_t> bytes(input.begin(), input.end());
  EXPECT_NO_THROW(target.run(bytes.data(), bytes.size())) << json(json::binary(bytes)).dump();
}

class FuzzTarget : public testing::TestWithParam<Target> {};

TEST_P(FuzzTarget, TakesChangedInputsOrRefusesThemByName) {
  const auto& target = GetParam();
  const auto corpus = corpus_of(target);
  refused = 0;
  for (const auto& input : corpus) {
    refused = 0;
    run(target, input);
    EXPECT_TRUE(refused == 0 || !target.is_valid) << input;
  }
  refused = 0;
  Fuzzed fuzzed(20261122);
  for (int round = 0; round < rounds && !HasFailure(); ++round)
    run(target, changed(corpus[fuzzed.below(corpus.size())], target.prefix, fuzzed));
  if (target.least_refused == 0) return;
  EXPECT_GT(refused * 100, rounds * target.least_refused);
  EXPECT_LT(refused, rounds) << "not one was right";
}

INSTANTIATE_TEST_SUITE_P(Corpus, FuzzTarget, testing::ValuesIn(targets),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace accelmgr::fuzz
